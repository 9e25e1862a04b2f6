"""Records as people look at them. Package: record."""
