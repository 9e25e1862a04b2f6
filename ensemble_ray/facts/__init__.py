"""What runs record: one class for each kind of fact, and the only code that knows how it is written."""
