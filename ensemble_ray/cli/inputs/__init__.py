"""Options of the commands, inputs of runs, and recorded runs."""
