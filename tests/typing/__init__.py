"""What type checkers of users see: checked by mypy and pyright, and run so that it cannot rot."""
