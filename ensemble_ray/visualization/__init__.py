"""Graphs of teams and runs as data, with places for their nodes, and as text and pictures."""
