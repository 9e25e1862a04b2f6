"""Delegation of work from one agent to another."""
