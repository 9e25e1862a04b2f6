"""Golden records: what earlier versions recorded of every construct is read, forked and resumed alike."""
