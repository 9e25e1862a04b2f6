"""Tests of the three packages, of their form, and of whole scenarios."""
