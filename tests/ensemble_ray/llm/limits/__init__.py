"""Tests of the room `limits`."""
