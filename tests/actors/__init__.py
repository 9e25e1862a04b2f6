"""Tests of the actors: plain classes on an event loop, and a few on a real cluster."""
