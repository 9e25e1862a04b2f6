"""The call or command to suggest for a run: to resume it, or to fork it if it failed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ensemble_ray.facts.ends import FailureRecorded, OutputRecorded
from ensemble_ray.facts.fact import Fact, kinds_of
from ensemble_ray.values.ids import delegating_call, node_key

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RunStore


def resume_advice(run_id: str, origin: str | None, *, field: str = "", command: str = "ensemble-ray") -> str:
    """Return how to resume a run (S-DUR-154).

    Args:
        run_id: The run.
        origin: Where its definition came from; empty: a program began it, which alone has the definition; None: not known.
        field: What is given besides, as an argument of `resume`: `max_tokens=N`, `allow_loss=True`.
        command: How the command line is called here.
    """
    option = f" --{field.replace('_', '-').removesuffix('=True').replace('=', ' ')}" if field else ""
    at_command = f"{command} resume {run_id}{option}"
    in_program = f"ensemble_ray.resume({run_id!r}, ensemble{field and f', {field}'}), in the program that began it"
    return f"{at_command}, or {in_program}" if origin is None else at_command if origin else in_program


def fork_advice(run_id: str, origin: str, facts: Iterable[Fact], *, command: str = "ensemble-ray") -> str:
    """Return how to begin a new run with what a failed run did; empty where no task failed, or there is nothing to use.

    Args:
        run_id: The failed run.
        origin: Where its definition came from; empty: a program began it, which alone has the definition.
        facts: What it recorded.
        command: How the command line is called here.
    """
    failed, has_output = "", False
    for fact in facts:
        if delegating_call(fact.name) is not None:
            continue
        if isinstance(fact.data, FailureRecorded):
            failed = failed or fact.name
        has_output |= isinstance(fact.data, OutputRecorded)
    if not failed or not has_output:
        return ""
    name = failed if "/" in failed else node_key(failed)
    if not origin:
        return f"ensemble_ray.fork({run_id!r}, {name!r}, ensemble), in the program that began it"
    return f"{command} fork {run_id} --from {shlex.quote(name)}"


async def read_fork_advice(store: RunStore, run_id: str, origin: str, *, command: str = "ensemble-ray") -> str:
    """Return `fork_advice` of a run of a store.

    Raises:
        RecordError: the record is damaged, or was removed meanwhile.
    """
    ends: list[Fact] = []
    async for page in store.read(run_id, kinds=kinds_of(OutputRecorded, FailureRecorded), has_data=False):
        ends += page
    return fork_advice(run_id, origin, ends, command=command)
