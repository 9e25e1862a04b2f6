"""Resume recorded runs, fork them, and decide at their review gates."""
