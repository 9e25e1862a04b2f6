"""A support team whose tools read and write the database of a shop, which each process opens for itself.

python examples/run_deps.py [LLM]
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ensemble_ray import Agent, Ensemble, Task, ToolContext, provide, tool

ORDERS = [("ada", "tea", "sent"), ("ada", "rice", "waits for payment"), ("bob", "salt", "sent")]


@dataclass
class Shop:
    """The deps of a run: a connection that no other process can use."""

    database: sqlite3.Connection


def create(file: str) -> None:
    """Write the database of the shop."""
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS orders (customer TEXT, item TEXT, state TEXT)")
        database.execute("DELETE FROM orders")
        database.executemany("INSERT INTO orders VALUES (?, ?, ?)", ORDERS)


@contextmanager
def open_shop(file: str) -> Generator[Shop]:
    """Open the database, and close it at the end of the run. Tools run in threads."""
    with closing(sqlite3.connect(file, check_same_thread=False)) as database:
        yield Shop(database)


@tool(effect="none")
def list_orders(context: ToolContext[Shop]) -> list[str]:
    """List the orders of the customer, with their states."""
    # The customer is the user of the run. A model cannot ask for the orders of another one.
    rows = context.deps.database.execute("SELECT item, state FROM orders WHERE customer = ?", [context.user])
    return [f"{item}: {state}" for item, state in rows]


@tool(effect="idempotent")
def cancel_order(context: ToolContext[Shop], item: str) -> str:
    """Cancel an order of the customer.

    Args:
        item: The ordered item.
    """
    with context.deps.database as database:
        change = "UPDATE orders SET state = 'cancelled' WHERE customer = ? AND item = ?"
        changed = database.execute(change, [context.user, item])
    return f"{item} is cancelled" if changed.rowcount else f"there is no order of {item}"


def main() -> None:
    """Answer one customer."""
    llm = sys.argv[1] if len(sys.argv) > 1 else "openai:gpt-4o-mini"
    file = str(Path(tempfile.mkdtemp()) / "shop.sqlite")
    create(file)
    support = Agent("Support", "Answer customers of a shop, and change their orders", tools=[list_orders, cancel_order])
    team = Ensemble(tasks=[Task("Answer the customer: {question}", agent=support)], llm=llm, deps_type=Shop)
    output = team.run({"question": "Cancel my rice"}, deps=provide(partial(open_shop, file)), user="ada")
    print(output.text)
    with closing(sqlite3.connect(file)) as database:
        print(*database.execute("SELECT * FROM orders"), sep="\n")


if __name__ == "__main__":
    main()
