"""Keys of an endpoint's callers, their stores, and decisions about requests, without a web framework."""
