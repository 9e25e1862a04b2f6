"""Messages between processes, retries, and clients of shared actors."""
