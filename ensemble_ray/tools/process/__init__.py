"""Programs that tools run."""
