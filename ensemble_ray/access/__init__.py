"""Admission of requests to an endpoint: keys, their stores, and decisions. It does not depend on a web framework."""
