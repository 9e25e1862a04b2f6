"""Tests of that room."""
