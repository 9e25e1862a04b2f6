"""Runs, seen from whoever began them."""
