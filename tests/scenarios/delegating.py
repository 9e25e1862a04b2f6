"""Teams whose agents hand work on: requests of the two tools, a manager with its workers, what came of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ensemble_ray import (
    Agent,
    DelegationCompletedEvent,
    DelegationFailedEvent,
    DelegationStartedEvent,
    DelegationTrace,
    Ensemble,
    EnsembleError,
    EnsembleOutput,
    ExecutionTrace,
    Runtime,
    ToolCall,
)
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.testing.scripted import ScriptEntry
from tests.builders import agent, call, task
from tests.scenarios.teams import Watcher


def hand(role: object, text: object = "do it", *, number: int = 0) -> ToolCall:
    """A manager asks a worker."""
    return call("delegate_task", json.dumps({"agent_role": role, "task_description": text}), number=number)


def ask(role: object, text: object = "help me", *, number: int = 0) -> ToolCall:
    """An agent asks a colleague."""
    return call("delegate", json.dumps({"agent_role": role, "task": text}), number=number)


def told(model: ScriptedModel) -> list[str]:
    """What a model was sent as tool results, in order, at its last call."""
    return [message.content or "" for message in model.calls[-1].messages if message.role == "tool"]


@dataclass(frozen=True)
class Ran:
    """A run that ended, one way or the other."""

    watcher: Watcher
    output: EnsembleOutput | None = None
    error: EnsembleError | None = None

    @property
    def given(self) -> EnsembleOutput:
        """Its output."""
        assert self.output is not None, self.error
        return self.output

    @property
    def trace(self) -> ExecutionTrace:
        """Its trace, of a failed run too."""
        trace = self.output.trace if self.output is not None else self.error and self.error.trace
        assert trace is not None
        return trace

    def attempts(self, role: str) -> Sequence[DelegationTrace]:
        """What an agent asked others for, by the trace of its first task that did so."""
        found = [trace for trace in self.trace.task_traces if trace.agent_role == role and trace.delegations]
        return found[0].delegations if found else ()

    @property
    def delegations(self) -> list[str]:
        """Delegation events in short: `started Writer`, `completed Writer`, `failed Writer`."""
        short = {"on_delegation_started": "started", "on_delegation_completed": "completed"}
        short["on_delegation_failed"] = "failed"
        return [f"{short[name]} {event.worker_role}" for name, event in self.watcher.heard if name in short]  # type: ignore[attr-defined]

    @property
    def started(self) -> list[DelegationStartedEvent]:
        """Workers that were asked."""
        return self.watcher.of(DelegationStartedEvent)

    @property
    def completed(self) -> list[DelegationCompletedEvent]:
        """Workers that answered."""
        return self.watcher.of(DelegationCompletedEvent)

    @property
    def failed(self) -> list[DelegationFailedEvent]:
        """What was refused or failed."""
        return self.watcher.of(DelegationFailedEvent)


def run_of(ensemble: Ensemble, runtime: Runtime) -> Ran:
    """Run it to its end."""
    watcher = Watcher()
    heard = ensemble.replace(listeners=[*ensemble.listeners, watcher])
    try:
        return Ran(watcher, output=heard.run(runtime=runtime))
    except EnsembleError as error:
        return Ran(watcher, error=error)


def worker(role: str, *entries: ScriptEntry, **fields: object) -> Agent:
    """A worker that answers every call with its role, or as its script says."""
    return agent(ScriptedModel(*entries) if entries else ScriptedModel(otherwise=f"by {role}"), role, **fields)


def team(manager: ScriptedModel, workers: Sequence[Agent], **fields: object) -> Ensemble:
    """A manager over these workers, with one task each."""
    tasks = [task(f"task of {each.role}", each) for each in workers]
    given: Mapping[str, object] = {"tasks": tasks, "workflow": "hierarchical", "manager_llm": manager, **fields}
    return Ensemble(**given)  # type: ignore[arg-type]  fields of an ensemble


def asked_of(worker: Agent) -> list[str]:
    """Descriptions of the tasks that a worker's model was asked for, first calls alone."""
    model = worker.llm
    assert isinstance(model, ScriptedModel)
    prompts = [each.messages[1].content or "" for each in model.calls if len(each.messages) == 2]
    return [prompt.partition("## Task\n")[2].partition("\n")[0] for prompt in prompts]
