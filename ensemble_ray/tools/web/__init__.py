"""Requests of the web tools, and the pages that they bring."""
