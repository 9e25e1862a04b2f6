"""Package serve.a2a: teams as agents of the A2A protocol, by its official SDK (extra `a2a`), which is imported with these modules."""
