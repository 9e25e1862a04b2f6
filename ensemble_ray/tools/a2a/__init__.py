"""Agents of other systems, called by the A2A protocol (extra `a2a`)."""
