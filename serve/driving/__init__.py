"""Driving runs that requests asked for: what was accepted, what runs, what came of it. Knows no HTTP."""
