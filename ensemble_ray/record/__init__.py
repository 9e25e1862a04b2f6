"""Room 5, record: facts in, durable lists of them and what folds over them out. Never events, never pickles."""
