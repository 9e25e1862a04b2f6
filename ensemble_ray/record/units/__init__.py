"""What loops, phases and graphs of a run gave: its order of outputs, histories, traces and errors. Pure."""
