"""Package tools: agents of other systems, asked by the A2A protocol and its official SDK (extra `a2a`), which is imported when one is asked."""
