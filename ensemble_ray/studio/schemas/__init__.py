"""What travels between the page and its server. Pure."""
