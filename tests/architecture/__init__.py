"""Form of the project: what can be checked without running it."""
