"""Agents of one process that hand work to each other, on a bench."""

from __future__ import annotations

import json
from collections.abc import Sequence

from msgspec.structs import replace

from ensemble_ray import Agent, DelegationContext, ToolCall
from ensemble_ray.execute.local_executor import LocalExecutor
from ensemble_ray.execute.orders import TaskResult
from ensemble_ray.facts.fact import Fact
from ensemble_ray.plan.plan import HierarchyRules
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from ensemble_ray.values.delegation import Peer
from tests.ensemble_ray.execute.running import RUN_CONTEXT, Bench, call, writer


def ask(role: str, text: str = "help", *, number: int = 0, tool: str = "delegate") -> ToolCall:
    """A request of either tool."""
    field = "task" if tool == "delegate" else "task_description"
    return call(tool, json.dumps({"agent_role": role, field: text}), number=number)


def member(role: str, *entries: object, **fields: object) -> Agent:
    """An agent that gives these entries turn by turn, also where the first turns are on record; or says who it is."""

    async def entry(asked: ScriptedCall) -> object:  # async, since a virtual clock does not wait for threads
        return entries[sum(message.role == "assistant" for message in asked.messages)]

    return writer(ScriptedModel(otherwise=entry if entries else f"by {role}"), role=role, **fields)


def together(
    *agents: Agent,
    known: Sequence[Fact] = (),
    journal: MemoryJournal | None = None,
    policies: Sequence[object] = (),
    rules: HierarchyRules | None = None,
    **context: object,
) -> Bench:
    """A bench whose agents know each other; under `rules` the first one is their manager."""
    keyed = {agent.role.lower(): agent for agent in agents}
    targets = [
        Peer(key=key, role=agent.role) for key, agent in keyed.items() if rules is None or agent is not agents[0]
    ]
    names = [f"policy {number}" for number in range(len(policies))]
    delegation = DelegationContext(peers=targets, policies=names, **context)  # type: ignore[arg-type]
    run_context = replace(RUN_CONTEXT, delegation=delegation, hierarchy=rules)
    bench = Bench(agents=keyed, known=known, journal=journal, context=run_context, policies=policies)
    executor = LocalExecutor(bench.runner, bench.agents, lambda _results: None, grace_s=1.0)
    assert bench.runner.peers is executor
    return bench


async def done_by(bench: Bench, key: str, *, epoch: int = 0) -> TaskResult:
    """The result of that agent's task, in its own place."""
    peers = bench.runner.peers
    assert peers is not None
    return await peers.perform(bench.order(key, epoch=epoch))
