"""What a definition is, as data, and whether two are the same."""
