"""What every process of the library needs: settings, context, threads, private files, and PostgreSQL."""
