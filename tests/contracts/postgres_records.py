"""What tests of records in PostgreSQL share: facts, and other processes with the same run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path

from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.record.postgres.store import PostgresStore
from tests.processes import Program, own_environment, program

RUN = "run-1"
#: How long stores of tests wait for a server that is there, s; so long that a slow machine is no lost server.
PATIENCE_S = 60.0

#: A process that owns the run, or joins it, and appends: `own` until it is refused, `join` a few.
OTHER = """
import asyncio, sys
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.ports import Persistence
from ensemble_ray.record.postgres.store import PostgresStore

def fact(number):
    return read_fact(run="run-1", kind="model", name=f"{sys.argv[2]}#0/{number}/model", at=1.0, data={"number": number})

async def main():
    store = PostgresStore(sys.argv[1], patience_s=60)
    if sys.argv[2] == "join":
        journal = await store.join("run-1", writer="other")
    else:
        owned = await store.begin("run-1")
        journal = owned.journal
    for number in range(50):
        await journal.append([fact(number)], until=Persistence.COMMITTED)
    if sys.argv[2] == "join":
        await journal.close()
        return
    print("ready", flush=True)
    while True:
        number += 1
        try:
            await journal.append([fact(number)], until=Persistence.COMMITTED)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
            return
        await asyncio.sleep(0.01)

asyncio.run(main())
"""


def elsewhere(url: str) -> PostgresStore:
    """A store that shares nothing with others of this process: as in another one."""
    return PostgresStore(f"{url}&application_name=elsewhere", patience_s=PATIENCE_S)


def fact(name: str = "facts#0/0/model", kind: str = "model", **data: object) -> Fact:
    """A fact of the run."""
    return read_fact(run=RUN, kind=kind, name=name, at=1.0, data=data)


def another_process(url: str, what: str, directory: Path) -> AbstractContextManager[Program]:
    """A process that owns the run (`own`) or joins it (`join`)."""
    command = [sys.executable, "-c", OTHER, url, what]
    return program(command, log=directory / f"{what}.log", env=own_environment(directory), cwd=Path.cwd())


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what the server does when it gets to it; nothing tells of it."""
    async with asyncio.timeout(90):
        while not await is_so():  # noqa: ASYNC110  see above
            await asyncio.sleep(0.01)
