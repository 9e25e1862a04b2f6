"""Runs of every construct, made in this process, with all that they say while they go on; for tests that read their records."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from ensemble_ray import (
    Agent,
    ChatMessage,
    ChatResponse,
    CostConfiguration,
    Ensemble,
    EnsembleError,
    EnsembleMemory,
    EnsembleOutput,
    Event,
    ExecutionTrace,
    InlineRuntime,
    InMemoryReflectionStore,
    MapEnsemble,
    MemoryStore,
    RemoteAgent,
    Review,
    ReviewDecision,
    ReviewRequest,
    TaskAnswer,
    TaskRequest,
    TokenUsage,
    current_tool_context,
    decide,
    fork,
    resume,
    tool,
)
from ensemble_ray.facts.fact import Fact
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, answer, call, task
from tests.ensemble_ray.memory.test_embeddings import long_term
from tests.ensemble_ray.record.delegating_team import Counted
from tests.ensemble_ray.record.unit_teams import TEAMS, World, write_torn
from tests.golden import teams, unit_teams
from tests.golden.model import other_answers
from tests.scenarios.teams import PATIENCE_S, Forever, task_of
from tests.scenarios.test_map_reduce_loops import Refining
from tests.scenarios.test_reflection_runs import reflecting
from tests.serve.remote_agents import Remote, served_remote

__all__ = ["STORIES", "MadeRun", "Maker"]

_COST = CostConfiguration(input_token_rate=Decimal("0.001"), output_token_rate=Decimal("0.01"))
_USAGE = TokenUsage(40, 10, -1, 30, 5)


@dataclass(frozen=True)
class MadeRun:
    """A run, and what it gave whoever began it or went on with it."""

    name: str
    facts: Sequence[Fact]
    output: EnsembleOutput | None
    error: EnsembleError | None
    #: none of a run that went on
    events: Sequence[Event] = ()

    @property
    def trace(self) -> ExecutionTrace | None:
        """Its trace; None: it was refused."""
        return self.error.trace if self.output is None and self.error is not None else self.output and self.output.trace


@dataclass
class Maker:
    """Makes runs in a folder."""

    home: Path
    runtime: InlineRuntime = field(init=False)
    store: SqliteStore = field(init=False)

    def __post_init__(self) -> None:
        self.runtime, self.store = InlineRuntime(home=self.home), SqliteStore(self.home)

    def run(self, name: str, team: Any, *, cancel_at: threading.Event | None = None, **inputs: object) -> MadeRun:
        """Run a team; cancel it when that happened."""
        run = team.replace(cost_configuration=_COST).start(inputs, runtime=self.runtime, run_id=name)
        if cancel_at is not None:
            assert cancel_at.wait(PATIENCE_S)
            run.cancel()
        events = [each for each in run.events() if isinstance(each, Event)]
        return self._made(name, name, lambda: run.result(PATIENCE_S), events)

    def resume(self, name: str, run_id: str, team: Any, **options: Any) -> MadeRun:
        """Go on with a run."""
        team = team.replace(cost_configuration=_COST)
        return self._made(name, run_id, lambda: resume(run_id, team, runtime=self.runtime, **options))

    def fork(self, name: str, run_id: str, from_task: str, team: Any) -> MadeRun:
        """Begin a fork of a run."""
        team = team.replace(cost_configuration=_COST)
        return self._made(name, name, lambda: fork(run_id, from_task, team, runtime=self.runtime, new_run_id=name))

    def kill(self, run: MadeRun, part: float, team: Any) -> MadeRun:
        """Go on with a copy of a run that was killed after a part of its facts."""
        run_id = f"{run.name}-killed-{part}"
        run_blocking(write_torn(self.store, run.facts[: int(len(run.facts) * part)], run_id))
        return self.resume(run_id, run_id, team)

    def _made(self, name: str, run_id: str, result: Callable[[], Any], events: Sequence[Event] = ()) -> MadeRun:
        output = error = None
        try:
            output = result()
        except EnsembleError as raised:
            error = raised
        return MadeRun(name, run_blocking(self.store.facts(run_id)), output, error, events)


def _golden(name: str) -> Any:
    return getattr(teams if hasattr(teams, name) else unit_teams, name)()


def _plain(asked: ScriptedCall) -> ChatResponse:
    return ChatResponse(f"{task_of(asked)} is done", usage=_USAGE)


def _finished(make: Maker) -> Iterator[MadeRun]:
    """Run all workflows, and teams with ends that a task or a budget brought about."""
    yield make.run("sequential", teams.sequential(), topic="tides")
    for name in (
        "parallel",
        "parallel_errors",
        "hierarchical",
        "nested",
        "checked",
        "structured",
        "tools",
        "streaming",
    ):
        yield make.run(name, _golden(name))
    for name in ("synthesized", "early_exit", "looped", "phased", "branched"):
        yield make.run(name, _golden(name))
    part = make.run("budget", teams.budget())
    yield part
    yield make.resume("budget-resumed", "budget", teams.budget(), max_tokens=100_000)
    uncounted = task("one", agent(ScriptedModel("uncounted")), name="one")
    yield make.run("uncounted", Ensemble(tasks=[uncounted, task("two", agent(ScriptedModel(otherwise=_plain)))]))


_FAILURE = ValueError("no answer")


def _failed(make: Maker) -> Iterator[MadeRun]:
    for name, question, instead in (
        ("sequential", "Writer|Write about tides|0", _FAILURE),
        ("parallel", "Writer|step c|0", _FAILURE),
        ("hierarchical", "Manager|Get these tasks done by your agents:|1", "I give up"),
        ("nested", "Payer|pay|1", _FAILURE),
        ("checked", "Reviewer|Review it|0", "bad words"),
        ("structured", "Geographer||0", "Still a city"),
        ("tools", "Worker|Use tools|2", _FAILURE),
        ("looped", "Critic|Criticise it|0", _FAILURE),
        ("phased", "Editor|Collect it|0", _FAILURE),
        ("branched", "Writer|Go right|0", _FAILURE),
        ("chunked", "Mapper|map 6|0", _FAILURE),
        ("adaptive", "Reducer|reduce map 6 (0)+map 7 (0)|0", _FAILURE),
    ):
        with other_answers({question: instead}):
            yield make.run(name, _golden(name), **{"topic": "tides"} if name == "sequential" else {})
    made = make.run("to-fork", teams.parallel())
    yield make.fork("parallel-forked", "parallel", "c", teams.parallel())
    yield make.fork("whole-forked", made.name, "d", teams.parallel())


def _delegating(make: Maker) -> Iterator[MadeRun]:
    """Delegate by a manager and among peers, some of whose workers fail or are refused."""
    yield make.run("hierarchy", Counted().hierarchy())
    yield make.run("peers", Counted().peers())


def _units(make: Maker) -> Iterator[MadeRun]:
    """Run units beside each other, inside each other, and stopped ones."""
    for name, team in TEAMS.items():
        yield make.run(name.replace(" ", "-"), team(World()))


def _mapped(make: Maker) -> Iterator[MadeRun]:
    for name in ("mapping", "strict_mapping", "chunked", "adaptive", "pipelined", "direct"):
        yield make.run(name, _golden(name))
    llm = ScriptedModel(otherwise=_plain)
    yield make.run("loops", MapEnsemble(items=range(2), map_task=Refining(), llm=llm, max_parallel_tasks=1))


def _killed(make: Maker) -> Iterator[MadeRun]:
    """Go on with runs that were killed."""
    for name in ("parallel", "nested", "hierarchical", "tools", "looped", "phased", "branched", "chunked", "adaptive"):
        whole = make.run(name, _golden(name))
        for part in (0.4, 0.7):
            yield make.kill(whole, part, _golden(name))
    make.run("whole", unit_teams.looped())
    yield make.fork("looped-forked", "whole", "loop:refine#1", unit_teams.looped())


@tool(effect="none")
def _broken(what: str) -> str:
    """Fail."""
    raise ValueError(what)


def _cancelled(make: Maker) -> Iterator[MadeRun]:
    """Stop a run while a model is asked, behind a call of a tool that fails."""
    never = Forever()
    called = ChatResponse("", (call("_broken", '{"what": "x"}'),), _USAGE)
    model = ScriptedModel(ChatResponse("one", usage=_USAGE), called, never)
    by = agent(model, tools=[_broken])
    team = Ensemble(tasks=[task(name, by, name=name) for name in ("one", "two", "three")])
    yield make.run("cancelled", team, cancel_at=never.asked)


@tool(effect="none", approval=True)
def _send(what: str) -> str:
    """Send it."""
    return f"sent {what}"


def _reviewed_team(**fields: Any) -> Ensemble:
    """Return a team: a task with a gate behind it, one with a gate before it, and one whose tool has one."""

    def send(asked: ScriptedCall) -> ChatResponse:
        if asked.messages[-1].role == "user":
            return ChatResponse("", (call("_send", '{"what": "x"}'),), _USAGE)
        return ChatResponse("it was sent", usage=_USAGE)

    by, sender = agent(ScriptedModel(otherwise=_plain)), agent(ScriptedModel(otherwise=send), "Sender", tools=[_send])
    after = task("after", by, name="after", review=Review(prompt="Polite?"))
    before = task("before", by, name="before", before_review=Review.required("Go?"))
    return Ensemble(tasks=[after, before, task("during", sender, name="during")], **fields)


def _reviewed(make: Maker) -> Iterator[MadeRun]:
    """Ask a handler; wait, and go on decision by decision."""
    decisions = {"after": ReviewDecision.edit("edited")}

    def decided(request: ReviewRequest) -> ReviewDecision:
        return decisions.get(request.task_description, ReviewDecision.continue_execution())

    yield make.run("reviewed", _reviewed_team(review_handler=decided))
    decisions["before"] = ReviewDecision.exit_early()
    yield make.run("left-before", _reviewed_team(review_handler=decided))
    decisions["after"] = ReviewDecision.exit_early()
    yield make.run("left-after", _reviewed_team(review_handler=decided))
    team = _reviewed_team(review_wait="detach")
    run = make.run("waiting", team)
    yield run
    while run.output is not None and run.output.open_reviews:
        (gate,) = run.output.open_reviews
        decide("waiting", gate.gate_id, ReviewDecision.continue_execution(), runtime=make.runtime)
        run = make.resume(f"{run.name}-on", "waiting", team)
        yield run


@tool(effect="none")
async def _advise(what: str) -> str:
    """Ask the model of the agent, as the tool of an MCP server may."""
    sampler = current_tool_context().sampler
    assert sampler is not None
    return (await sampler.sample([ChatMessage("user", what)])).text or ""


class _Runner:
    """An agent of another framework."""

    async def run(self, request: TaskRequest) -> AsyncIterator[str | TaskAnswer]:
        yield "its answer"
        yield TaskAnswer(input_tokens=2, output_tokens=3)


def _aided(make: Maker) -> Iterator[MadeRun]:
    """Use memory, reflections, sampling, agents of others."""
    by = agent(ScriptedModel(otherwise=_plain))
    yield make.run(
        "remembering",
        Ensemble(
            tasks=[task(name, by, name=name, memory_scopes="notes") for name in ("one", "two")],
            memory_store=MemoryStore.in_memory(),
            memory=EnsembleMemory(short_term=True, long_term=long_term()),
        ),
    )
    learner = agent(ScriptedModel(otherwise=lambda asked: ChatResponse(reflecting(asked), usage=_USAGE)))
    reflected = task("one", learner, name="one", reflection_config=True)
    yield make.run("reflecting", Ensemble(tasks=[reflected], reflection_store=InMemoryReflectionStore()))
    for name, last in (("sampling", answer("done", 20, 2)), ("sampling-failed", _FAILURE)):
        asks = ChatResponse("", (call("_advise", '{"what": "tea"}'),), _USAGE)
        model = ScriptedModel(asks, answer("green", 5, 4), last)
        yield make.run(name, Ensemble(tasks=[task("one", agent(model, tools=[_advise]), name="one")]))
    runner = Agent(role="Runner", goal="Run", runner=_Runner())
    yield make.run("runner", Ensemble(tasks=[task("one", runner, name="one")]))
    with served_remote(Remote()) as url:
        for word in ("well", "fail"):
            remote = task("Paint", RemoteAgent(url), expected_output=f"say-{word}", name="one")
            yield make.run(f"remote-{word}", Ensemble(tasks=[remote]))


#: Runs by what they are about; each makes its own in an empty folder.
def _reused(make: Maker) -> Iterator[MadeRun]:
    """Run a team twice: its second run takes all answers from the first; kill it, and fork it."""

    @tool
    def look() -> str:
        """Look."""
        return "seen"

    def team() -> Any:
        lead = agent(ScriptedModel(call("look"), answer("looked"), otherwise=_plain), "Lead", tools=[look])
        writer = agent(ScriptedModel(otherwise=_plain), "Writer")
        first = task("find", lead, name="find", reuse="1d")
        return Ensemble(tasks=[first, task("write", writer, name="write", context=[first], reuse="1d")])

    def mapped() -> Any:
        clerk = agent(ScriptedModel(otherwise=_plain), "Clerk")
        return MapEnsemble(items=["a", "b"], map_task=lambda item: task(str(item), clerk, reuse="1d"))

    yield make.run("asked", team())
    again = make.run("reused", team())
    assert again.trace is not None
    assert (again.trace.metrics.total_llm_call_count, again.trace.metrics.total_reused_calls) == (0, 3)
    yield again
    for part in (0.3, 0.6, 0.9):
        yield make.kill(again, part, team())
    yield make.fork("forked", "reused", "write", team())
    yield make.run("asked-map", mapped())
    yield make.run("reused-map", mapped())


STORIES: Mapping[str, Callable[[Maker], Iterator[MadeRun]]] = {
    "finished": _finished,
    "failed and forked": _failed,
    "delegating": _delegating,
    "units": _units,
    "mapped": _mapped,
    "killed": _killed,
    "cancelled": _cancelled,
    "reviewed": _reviewed,
    "aided": _aided,
    "reused": _reused,
}
