"""Settings, context, threads, private files, and PostgreSQL of a process."""
