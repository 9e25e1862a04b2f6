"""Tool calls of an agent: their effects, and effects whose outcome is unknown."""
