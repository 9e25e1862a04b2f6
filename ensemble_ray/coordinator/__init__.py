"""The coordinator of a run: it journals what happened, asks the run's source, and carries out what that wants."""
