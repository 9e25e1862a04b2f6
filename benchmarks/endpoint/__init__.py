"""Measurements of an endpoint: what a request costs, many runs at once, and memory under steady load."""
