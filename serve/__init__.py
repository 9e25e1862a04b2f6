"""The HTTP endpoint: teams behind Ray Serve. It holds no state of runs. Functions raise `Refusal` for rejected requests."""
