"""HTTP and HTML for the web tools."""
