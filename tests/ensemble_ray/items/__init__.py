"""Tests of the room `items`."""
