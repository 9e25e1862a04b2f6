"""Texts for models, built from values without calls or decisions."""
