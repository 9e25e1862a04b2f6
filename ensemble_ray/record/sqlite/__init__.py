"""Records in SQLite, one file a run."""
