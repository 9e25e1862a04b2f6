"""Tool calls of an agent, and calls with an unknown outcome."""
