"""Tests of the room `schedule`."""
