"""Messages between processes, retries, the event hub, and clients of shared actors."""
