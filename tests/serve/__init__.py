"""The edge over HTTP: its parts in this process, and one real Serve instance."""
