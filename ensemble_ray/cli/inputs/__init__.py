"""What a command is given: inputs, items, runs."""
