"""Options, inputs of runs, and recorded runs."""
