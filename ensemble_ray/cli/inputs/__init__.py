"""Arguments of the commands: inputs, tags, recorded runs."""
