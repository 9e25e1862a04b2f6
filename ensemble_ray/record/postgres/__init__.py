"""Records in PostgreSQL, all runs in one database."""
