"""Facts: one class for each kind of record entry, and the only code for their encoding."""
