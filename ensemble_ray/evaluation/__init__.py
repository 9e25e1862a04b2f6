"""Evaluate a team on cases: run it, score its outputs, summarize and compare the scores."""
