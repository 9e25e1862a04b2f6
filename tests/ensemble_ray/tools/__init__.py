"""Tests of the room tools."""
