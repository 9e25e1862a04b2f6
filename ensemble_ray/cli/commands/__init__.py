"""The commands. Each module has those of one subject."""
