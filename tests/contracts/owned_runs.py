"""Runs as their owners leave them, for contract tests of stores: begun here, or by a program that dies."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import ensemble_ray
from ensemble_ray import RunState
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.ports import Persistence
from ensemble_ray.record.stores import OwnedRun, RunStore, StoreAddress
from tests.template import ForkedProgram

RUN = "run-1"
ME = f"process {os.getpid()} on {socket.gethostname()}"
_HOME_OF_CODE = Path(ensemble_ray.__file__).parents[1]
#: Beginning of a program that owns a run; its first argument is the store's address.
_PROGRAM = """
import asyncio, json, os, signal, sys, time
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.values.outputs import RunState
from ensemble_ray.ports import Persistence
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress

store = store_at(StoreAddress(**json.loads(sys.argv[1])))

def fact(name="a#0/0/model", kind="model", **data):
    return read_fact(run="run-1", kind=kind, name=name, at=1.0, data=data)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    run = await store.begin("run-1", origin="team.yaml")
    await run.write_state(RunState.RUNNING)
"""


def fact(name: str = "a#0/0/model", kind: str = "model", **data: object) -> Fact:
    """A fact of the run."""
    return read_fact(run=RUN, kind=kind, name=name, at=1.0, data=data)


async def begun(store: RunStore, run_id: str = RUN, facts: Sequence[Fact] = ()) -> OwnedRun:
    """A run that is running and has recorded something."""
    run = await store.begin(run_id, origin="team.yaml")
    await run.journal.append(facts or [fact("run", "plan")], until=Persistence.COMMITTED)
    await run.write_state(RunState.RUNNING)
    return run


async def state_of(store: RunStore, run_id: str = RUN) -> RunState:
    """How a run stands."""
    found = await store.summary(run_id)
    assert found is not None
    return found.state


async def until_left(store: RunStore, *run_ids: str) -> None:
    """Return when these runs have no owner; that a process died, a database notices when it gets to it."""
    async with asyncio.timeout(90):
        for run_id in run_ids:
            while (found := await store.summary(run_id)) is None or found.owner:  # noqa: ASYNC110  nothing tells of it
                await asyncio.sleep(0.01)


@contextmanager
def program_on(address: StoreAddress, rest: str) -> Generator[subprocess.Popen[str]]:
    """A process that owns the run and goes on with these lines; it is ended with the block."""
    code = _PROGRAM + "".join(f"    {line}\n" for line in rest.strip().splitlines()) + "asyncio.run(main())\n"
    command = [sys.executable, "-c", code, json.dumps(asdict(address))]
    with ForkedProgram[str](command, cwd=_HOME_OF_CODE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that it printed."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
