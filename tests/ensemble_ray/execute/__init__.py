"""Tests of the room `execute`."""
