"""Tools of an MCP server. This file is the agent and a small server that the agent's process starts.

python examples/mcp_tools.py [LLM]
"""

from __future__ import annotations

import shlex
import sys

from ensemble_ray import MCP, Agent, Ensemble, Task


def serve() -> None:
    """Serve one tool on standard input and output, with the official SDK."""
    from mcp.server.mcpserver import MCPServer
    from mcp_types import ToolAnnotations

    server = MCPServer("stock", log_level="WARNING")

    # It changes nothing, so the call may be repeated if the server dies.
    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    def in_stock(item: str) -> int:
        """Tell how many pieces of an item there are."""
        return {"tea": 12, "rice": 0}.get(item, 0)

    server.run()


def main(llm: str = "openai:gpt-4o-mini") -> None:
    stock = MCP(f"stdio:{shlex.join([sys.executable, __file__, '--serve'])}", prefix="shop_")
    clerk = Agent(role="Clerk", goal="Answer questions about the stock", tools=[stock], llm=llm)
    print(Ensemble(tasks=[Task(description="Is there tea?", expected_output="One sentence", agent=clerk)]).run().raw)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        main(*sys.argv[1:])
