"""Review gates of tasks, and the handlers that decide at them."""
