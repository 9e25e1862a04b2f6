"""`/mcp`: teams as tools of an MCP server, over streamable HTTP (S-INT-25 to S-INT-29)."""
