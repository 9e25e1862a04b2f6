"""Describe definitions as data and compare them."""
