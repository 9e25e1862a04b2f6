"""The actor that writes the record of runs for other nodes."""
