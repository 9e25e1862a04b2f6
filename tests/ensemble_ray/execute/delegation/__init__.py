"""Tests of delegation."""
