"""Runs seen from whoever began them: what is asked of a runtime, who owns a record, how a run ended."""
