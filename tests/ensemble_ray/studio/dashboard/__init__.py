"""Parts of a dashboard, each by itself."""
