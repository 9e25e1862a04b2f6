"""Tests of evaluations."""
