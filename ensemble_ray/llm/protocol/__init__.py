"""Requests and answers of the chat-completions protocol."""
