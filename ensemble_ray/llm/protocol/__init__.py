"""Calls of an endpoint of the chat-completions protocol."""
