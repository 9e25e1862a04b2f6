"""Recorded runs that go on."""
