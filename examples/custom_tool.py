"""Tools of your own: a function, a function with heavy computation, and a class with a typed input.

python examples/custom_tool.py [LLM]
"""

from __future__ import annotations

import sys
from typing import Annotated

from pydantic import BaseModel, Field

from ensemble_ray import AbstractTypedAgentTool, Agent, Ensemble, EnsembleOutput, Task, ToolCallEvent, ToolResult, tool


@tool
def price_of(item: Annotated[str, Field(description="Name of the item, for example tea")]) -> str:
    """Look up the price of an item in the shop."""
    prices = {"tea": 3.20, "rice": 1.10}
    if item not in prices:
        # The model reads the error, so it lists what would work.
        return f"Error: no item '{item}'. Known: {', '.join(sorted(prices))}"
    return f"{item} costs {prices[item]:.2f}"


@tool(cpu=True, timeout=60)
def count_primes(below: int) -> int:
    """Count the primes below a number. It runs in another process, so that several calls use several cores."""
    sieve = bytearray([1]) * max(below, 2)
    sieve[:2] = b"\0\0"
    for number in range(2, int(below**0.5) + 1):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(range(number * number, len(sieve), number)))
    return sum(sieve[:below])


class Order(BaseModel):
    """What `OrderTool` takes; the descriptions are what the model reads."""

    item: str = Field(description="Name of the item")
    amount: int = Field(default=1, ge=1, description="How many")


class OrderTool(AbstractTypedAgentTool[Order]):
    """Notes an order. A class can hold what its calls share; on Ray there is one copy per process of the agent."""

    name = "order"
    description = "Orders an item"
    input_type = Order

    def execute_typed(self, order: Order) -> ToolResult:
        """Note it under the key of the call: a call that is repeated after a crash has the same key."""
        self.context.logger.info("order %s", self.context.idempotency_key)
        return ToolResult.success(f"Ordered {order.amount} x {order.item}", structured_output=order)


def show(event: ToolCallEvent) -> None:
    """Print arguments and result of a tool call."""
    print(f"{event.tool_name}({event.tool_arguments}) -> {event.tool_result} [{event.outcome}]")


def main(llm: str = "openai:gpt-4o-mini") -> EnsembleOutput:
    clerk = Agent(
        role="Clerk",
        goal="Serve customers with the tools you have",
        tools=[price_of, count_primes, OrderTool()],
        llm=llm,
        max_iterations=6,
    )
    task = Task(
        description="Tell the price of tea, order two of it, and say how many primes there are below 1000000",
        expected_output="Three short sentences",
        agent=clerk,
    )
    output = Ensemble(tasks=[task], on_tool_call=show).run()
    print(f"\n{output.raw}")
    return output


if __name__ == "__main__":
    main(*sys.argv[1:2])
