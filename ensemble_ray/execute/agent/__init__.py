"""One agent at work: the loop of model calls and tool calls, and what is made of its answers."""
