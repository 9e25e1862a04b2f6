"""Records of runs. In: facts. Out: durable lists and folds of them. Never events, never pickles."""
