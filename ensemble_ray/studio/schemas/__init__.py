"""What travels between the page and its server. Package: studio. Pure."""
