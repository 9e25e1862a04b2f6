"""Tests of the room loader."""
