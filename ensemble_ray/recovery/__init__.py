"""Recorded runs that go on: under their own id, or as a fork under another one."""
