"""Text of others: replace what cannot be written, find JSON, escape controls."""
