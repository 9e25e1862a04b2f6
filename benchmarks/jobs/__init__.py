"""The work of the warm scenarios: per file one kind, hand-written (the floor) and as a team."""
