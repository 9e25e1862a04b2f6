"""Memory that lasts, in one file of SQLite."""
