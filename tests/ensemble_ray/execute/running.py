"""What a task runner needs around it, all of it in memory, and orders for it to run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ensemble_ray import (
    AbstractAgentTool,
    Agent,
    AgentTool,
    ChatMessage,
    ChatResponse,
    Effect,
    NoOpToolMetrics,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
    UnknownEffect,
)
from ensemble_ray.events import Event
from ensemble_ray.execute.callables import LocalCallables
from ensemble_ray.execute.orders import RunContext, TaskOrder, TaskResult
from ensemble_ray.execute.runner import TaskRunner
from ensemble_ray.execute.scope import RunnerPorts, RunReflections, spending_here
from ensemble_ray.facts.fact import Fact
from ensemble_ray.llm.limits.limiter import process_limiter
from ensemble_ray.ports import DriverServices, Persistence, Reviewer, RunMemory, Services, StoredAnswers
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.testing import ManualClock, RecordingSink, ScriptedModel
from tests.ensemble_ray.tools.doubles import PoolHere

RUN_CONTEXT = RunContext(
    run_id="run",
    workflow="sequential",
    total_tasks=2,
    interest=frozenset(kind.method for kind in Event.__subclasses__()),
)


def call(name: str, arguments: str = "{}", *, number: int = 0) -> ToolCall:
    """A tool request of a model."""
    return ToolCall(id=f"id-{number}", name=name, arguments=arguments)


def writer(llm: object, **fields: object) -> Agent:
    """An agent."""
    return Agent(**{"role": "Writer", "goal": "Write", "llm": llm, **fields})  # type: ignore[arg-type]  fields of an agent


def named(facts: Sequence[Fact]) -> list[tuple[str, str]]:
    """Kind and name of each."""
    return [(fact.kind, fact.name) for fact in facts]


class WatchedJournal(MemoryJournal):
    """Keeps how safe each fact had to be before its writer went on."""

    def __init__(self, known: Sequence[Fact] = ()) -> None:
        super().__init__("run", known)
        self.degrees: list[tuple[str, str, Persistence]] = []

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:
        """Add them."""
        self.degrees.extend((fact.kind, fact.name, until) for fact in facts)
        await super().append(facts, epoch=epoch, until=until)

    def degrees_of(self, *kinds: str) -> list[tuple[str, Persistence]]:
        """Kind and degree of the facts of these kinds, in order."""
        return [(kind, until) for kind, _, until in self.degrees if kind in kinds]


class Bench:
    """A runner with its ports; orders are made of agents or handlers."""

    def __init__(
        self,
        *,
        agents: Mapping[str, Agent] | None = None,
        handlers: Mapping[str, Callable[[object], object]] | None = None,
        known: Sequence[Fact] = (),
        journal: MemoryJournal | None = None,
        sink: RecordingSink | None = None,
        context: RunContext = RUN_CONTEXT,
        driver: DriverServices | None = None,
        ask_unknown: Callable[[UnknownEffect], object] | None = None,
        policies: Sequence[object] = (),
        reviewer: Reviewer | None = None,
        memory: RunMemory | None = None,
        reflections: RunReflections | None = None,
        answers: StoredAnswers | None = None,
    ) -> None:
        self.clock = ManualClock(start=1000.0)
        self.journal = journal or MemoryJournal("run", known)
        self.sink = sink or RecordingSink()
        context = replace(
            context, interest=frozenset(kind.method for kind in Event.__subclasses__() if self.sink.wants(kind))
        )
        self.agents = dict(agents or {})
        self.tasks = {
            **{key: Task(description=f"Do {key}", expected_output="Prose") for key in self.agents},
            **{
                key: Task(description=f"Do {key}", expected_output="Prose", handler=handler)
                for key, handler in (handlers or {}).items()
            },
        }
        ports = RunnerPorts(
            clock=self.clock,
            journal=self.journal,
            events=self.sink,
            callables=LocalCallables(self.tasks, policies),
            services=Services(limiter=process_limiter(), cpu=PoolHere(), driver=driver),
            tool_metrics=NoOpToolMetrics(),
            spending=spending_here(context.budget, context.cost),
            ask_unknown=ask_unknown,
            reviewer=reviewer,
            memory=memory,
            reflections=reflections,
            answers=answers,
        )
        self.runner = TaskRunner(context, ports, self.agents)

    def order(self, key: str, *, agent_key: str | None = None, **changes: object) -> TaskOrder:
        """The order for a task; `agent_key` when several tasks have one agent."""
        agent = self.agents.get(agent_key or key)
        fields: dict[str, object] = {
            "run_id": "run",
            "key": key,
            "instance": f"{key}#0",
            "epoch": 0,
            "index": 1,
            "task": self.tasks.get(key) or self.tasks[agent_key or key],
            "agent_key": None if agent is None else agent_key or key,
            "agent_role": "(deterministic)" if agent is None else agent.role,
            **changes,
        }
        return TaskOrder(**fields)  # type: ignore[arg-type]  fields of an order

    async def run(self, key: str = "draft", *, is_stopped: bool = False, **changes: object) -> TaskResult:
        """Run one task to its end."""
        return await self.runner.run(self.order(key, **changes), is_stopped=lambda: is_stopped)

    @property
    def named(self) -> list[tuple[str, str]]:
        """Kind and name of every fact."""
        return named(self.journal.facts())


WITH_A_TOOL = [
    ("model", "draft#0/0/model"),
    ("tool_intent", "draft#0/0/call-0"),
    ("tool_result", "draft#0/0/call-0"),
    ("model", "draft#0/1/model"),
    ("output", "draft#0"),
]


class Search(AbstractAgentTool):
    """Keeps what it was asked, and the key that names each request."""

    name = "search"
    description = "Searches."

    def __init__(self, effect: Effect = "once") -> None:
        self.effect = effect
        self.asked: list[str] = []
        self.keys: list[str] = []

    async def do_execute(self, text: str, /) -> ToolResult:  # type: ignore[override]  async is allowed
        self.asked.append(text)
        self.keys.append(self.context.idempotency_key)
        return ToolResult.success("3 hits", {"hits": 3})


def searching(search: AgentTool, *entries: object) -> tuple[Bench, ScriptedModel]:
    """A task whose agent searches once, then answers."""
    model = ScriptedModel(*(entries or (call("search", '{"input": "Ray"}'), "Three")))  # type: ignore[arg-type]  entries
    return Bench(agents={"draft": writer(model, tools=[search])}), model


class InPieces:
    """Streams the answers of a scripted model in pieces; an entry after a text with `...` is raised after the first piece."""

    chat: Callable[..., Awaitable[ChatResponse]]
    _entries: list[Any]

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncIterator[str | ChatResponse]:
        response = await self.chat(messages)
        assert response.text is not None
        if response.text.endswith("..."):
            yield response.text
            raise self._entries.pop(0)
        for piece in response.text.split(" "):
            yield piece
