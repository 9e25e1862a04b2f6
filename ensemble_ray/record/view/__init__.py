"""Records rendered for users."""
