"""Records as people look at them."""
