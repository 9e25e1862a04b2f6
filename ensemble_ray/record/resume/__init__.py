"""What a run goes on with: its head, its budget, what a fork uses."""
