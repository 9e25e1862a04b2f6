"""Tests of who decides at review gates."""
