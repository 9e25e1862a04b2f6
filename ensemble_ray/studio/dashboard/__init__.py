"""A page beside a running ensemble: its events as they happen, its reviews."""
