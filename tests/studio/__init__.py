"""Tests of studio over HTTP."""
