"""Records in PostgreSQL, all runs in one database. Package: record."""
