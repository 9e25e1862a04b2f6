"""Tests of studio: folds and readers, offline."""
