"""Texts for models, made from values. Nothing is called and nothing is decided here."""
