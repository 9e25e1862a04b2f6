"""The agent loop of a task: model calls, tool calls, and structured answers."""
