"""Room; see the architecture page."""
