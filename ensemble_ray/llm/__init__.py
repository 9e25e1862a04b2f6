"""Chat models: endpoints of the chat-completions protocol, local models, and rate-limited models."""
