"""Commands as jobs."""
