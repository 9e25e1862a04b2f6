"""Replays a recorded run with today's code and returns the first difference (S-DUR-55).

The usual runner executes each task on recorded answers and results: no model, tool or handler is called.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar, Union

from msgspec import Struct, structs

from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.phase import Phase
from ensemble_ray.ensemble import Ensemble
from ensemble_ray.errors import AgentExecutionError, RecordError, ValidationError
from ensemble_ray.execute.callables import LocalCallables
from ensemble_ray.execute.orders import (
    EvaluationFailed,
    HistoryPart,
    TaskBody,
    TaskFailure,
    TaskOrder,
    TaskResult,
    TaskStatus,
)
from ensemble_ray.execute.runner import TaskRunner
from ensemble_ray.execute.scope import RunnerPorts, exit_of
from ensemble_ray.facts.effects import DelegationDecided, ModelAnswered, ToolIntended, ToolReturned, is_making_agent
from ensemble_ray.facts.fact import Fact, FactData, as_text, find_fact, kinds_of
from ensemble_ray.facts.runs import ExitRecorded, FailureRecorded, OutputRecorded, PlanRecorded, StimulusRecorded
from ensemble_ray.llm.limits.limiter import process_limiter
from ensemble_ray.plan.plan import Plan
from ensemble_ray.plan.planner import Planned
from ensemble_ray.ports import Persistence, Services
from ensemble_ray.process.concurrency import SystemClock, run_blocking, threads
from ensemble_ray.record.head import locate_errors, origin_in, read_head
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.identity.definition import compare_fields, recorded_inputs
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.resume.reading import recorded_options
from ensemble_ray.record.source import FoldedSource, RecordedStimuli, path_of_question
from ensemble_ray.record.stores import RecordedRun, StoreAddress
from ensemble_ray.record.trace import outputs_of
from ensemble_ray.record.work import RecordedWork
from ensemble_ray.recovery.resuming import plan_again, planned_form
from ensemble_ray.runs.handle import Run
from ensemble_ray.runs.launching import run_context_of
from ensemble_ray.runs.outputs import InMemoryOutputs, OutputStore
from ensemble_ray.runs.planned_tasks import make_order
from ensemble_ray.runs.unit_evaluations import LocalPredicates, list_predicates
from ensemble_ray.schedule.instructions import EdgeMatches, Start, UntilHolds
from ensemble_ray.schedule.stimuli import Completed, Evaluated
from ensemble_ray.schedule.unit import HistoryEntry
from ensemble_ray.teamfile import Runnable, load_source
from ensemble_ray.testing.scripted import RecordingSink
from ensemble_ray.tools.cpu import LokyCpuPool
from ensemble_ray.tools.user_code import NoOpToolMetrics
from ensemble_ray.values.error_data import error_from
from ensemble_ray.values.ids import RUN, delegating_call, instance_of, is_inside_unit, node_key
from ensemble_ray.values.memory import MemoryNote, MemoryQuery, RecalledMemory, RememberedNote
from ensemble_ray.values.messages import ChatMessage, ChatResponse, ToolSpec
from ensemble_ray.values.outputs import EnsembleOutput, ExitReason
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.trace import CaptureMode, TaskTrace, jsonable

D = TypeVar("D", bound=FactData)

_ENDS = (OutputRecorded, FailureRecorded, ExitRecorded)  # the runner would reuse these and execute no step
_ANSWERS = frozenset(kinds_of(ModelAnswered, ToolReturned))  # recorded effects that a task reuses
#: The running instance; several run at the same time when work is delegated.
_AT_WORK: ContextVar[str] = ContextVar("ensemble_ray_replayed", default="")
_SHOWN, _BEFORE = 80, 20  # characters shown of a text, and before its first difference


class Difference(Struct, frozen=True, kw_only=True):
    """A place where today's code differs from the record."""

    where: str  # `the plan`, or the task with turn and call
    what: str
    recorded: str
    current: str

    def __str__(self) -> str:
        return f"  where:    {self.where}\n  what:     {self.what}\n  recorded: {self.recorded}\n  today:    {self.current}"


def _between(where: str, what: str, recorded: object, current: object) -> Difference:
    old, new = (each if isinstance(each, str) else repr(each) for each in (recorded, current))
    same = next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    start = max(0, same - _BEFORE)
    return Difference(where=where, what=what, recorded=_window(old, start), current=_window(new, start))


def _unrecorded(where: str, what: str, current: str) -> Difference:
    return Difference(where=where, what=what, recorded="nothing", current=_window(current, 0))


def _window(text: str, start: int) -> str:
    part = text[start : start + _SHOWN]
    return f"{'...' if start else ''}{part!r}{'...' if start + _SHOWN < len(text) else ''}"


class _Recorded(UserDict[tuple[str, str], Fact]):
    """Facts of a task; `used` contains the keys that were looked up."""

    def __init__(self, facts: Mapping[tuple[str, str], Fact]) -> None:
        self.used: set[tuple[str, str]] = set()
        super().__init__(facts)

    def __getitem__(self, key: tuple[str, str]) -> Fact:
        fact = super().__getitem__(key)
        self.used.add(key)
        return fact


class _ReplayJournal:
    """Returns recorded facts, stores none, and notes the first difference per task.

    Delegated work is replayed on its own record; decision and result are compared when the task would record them.
    """

    def __init__(self, facts: Sequence[Fact]) -> None:
        self._of: dict[str, dict[tuple[str, str], Fact]] = {}
        self._ends: dict[str, Fact] = {}
        for fact in facts:
            instance = fact.instance
            if instance == RUN or isinstance(fact.data, StimulusRecorded) or is_making_agent(fact):
                continue
            if isinstance(fact.data, _ENDS):
                if not self.has_output(instance):  # an exit after the output happened at a gate
                    self._ends[instance] = fact
            else:
                self._of.setdefault(instance, {})[fact.name, fact.kind] = fact
        self._at: dict[str, _Recorded] = {}
        #: the first difference of a task, and whether it requested an effect at the end of its record
        self._notes: dict[str, tuple[Difference, bool]] = {}
        self._compared: set[tuple[str, str]] = set()

    @property
    def used(self) -> int:
        answered = sum(kind in _ANSWERS for recorded in self._at.values() for _, kind in recorded.used)
        return answered + sum(kind in _ANSWERS for _, kind in self._compared)

    @contextmanager
    def at(self, instance: str) -> Generator[None]:
        """Attribute all requests of the block to that task."""
        token = _AT_WORK.set(instance)
        try:
            yield
        finally:
            _AT_WORK.reset(token)

    def report(self, difference: Difference, *, instance: str | None = None, is_at_end: bool = False) -> NoReturn:
        """Note a task's first difference and stop the task."""
        self._notes.setdefault(instance or _AT_WORK.get(), (difference, is_at_end))
        raise AgentExecutionError(f"Replay: {difference.what}")

    def find_difference(self, instance: str) -> Difference | None:
        """Return a task's first deviating step, else a recorded effect that it did not request."""
        if instance in self._notes:
            return self._notes[instance][0]
        asked = self._at.get(instance)
        facts = self._of.get(instance, {})
        unused = [] if asked is None else [facts[key] for key in asked if key not in asked.used and key[1] in _ANSWERS]
        unused += [facts[key] for key in facts if key[1] == DelegationDecided.KIND and key not in self._compared]
        if not unused:
            return None
        return Difference(where=_place_of(unused[0].name), what="a call", recorded="made", current="not made")

    def is_at_end(self, instance: str) -> bool:
        """Whether a task requested an effect at the end of its record."""
        return instance in self._notes and self._notes[instance][1]

    def find_recorded(self, name: str, wanted: type[D]) -> D | None:
        fact = find_fact(self._of.get(name.rsplit("/", 2)[0], {}), name, wanted)
        return None if fact is None else fact.data

    def end_of(self, instance: str) -> Fact | None:
        return self._ends.get(instance)

    def has_output(self, instance: str) -> bool:
        end = self._ends.get(instance)
        return end is not None and isinstance(end.data, OutputRecorded)

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:
        """Compare delegations; the start of a call means that its result is not recorded."""
        del epoch, until
        for fact in facts:
            if isinstance(fact.data, DelegationDecided):
                self._compare_decision(fact, fact.data)
            elif isinstance(fact.data, ToolReturned) and self._is_performed(fact.name):
                self._compare_result(fact, fact.data)
            elif isinstance(fact.data, ToolIntended):
                call = f"{fact.data.tool_name}({fact.data.arguments})"
                difference = _unrecorded(_place_of(fact.name), "a call whose result is not recorded", call)
                self.report(difference, instance=fact.instance, is_at_end=True)

    async def lookup_recorded(self, instance: str) -> Mapping[tuple[str, str], Fact]:
        """Return a task's facts without its end and the results of its delegations."""
        facts = self._of.get(instance, {})

        def is_shown(name: str, kind: str) -> bool:
            if kind == ToolIntended.KIND:  # if the call never returned, the record ends there
                return (name, ToolReturned.KIND) in facts
            return kind != DelegationDecided.KIND and not (kind == ToolReturned.KIND and self._is_performed(name))

        self._at[instance] = _Recorded({key: fact for key, fact in facts.items() if is_shown(*key)})
        return self._at[instance]

    def _is_performed(self, name: str) -> bool:
        decided = self.find_recorded(name, DelegationDecided)
        return decided is not None and decided.worker is not None

    def _compare_decision(self, fact: Fact, decision: DelegationDecided) -> None:
        recorded = self.find_recorded(fact.name, DelegationDecided)
        where, current = _place_of(fact.name), _describe_decision(decision)
        if recorded is None:
            nothing = _unrecorded(where, "a delegation that is not recorded", current)
            self.report(nothing, instance=fact.instance, is_at_end=True)
        self._compared.add((fact.name, fact.kind))
        if (found := _first(where, ("the delegation", _describe_decision(recorded), current))) is not None:
            self.report(found, instance=fact.instance)

    def _compare_result(self, fact: Fact, result: ToolReturned) -> None:
        recorded = self.find_recorded(fact.name, ToolReturned)
        if recorded is None:
            return  # the run died before it was recorded
        self._compared.add((fact.name, fact.kind))
        found = _first(
            _place_of(fact.name),
            ("the result of the delegation", recorded.text, result.text),
            ("the outcome of the delegation", recorded.outcome, result.outcome),
        )
        if found is not None:
            self.report(found, instance=fact.instance)

    async def store_content(self, content: bytes) -> bool:
        del content  # the record contains it
        return True

    async def read_content(self, sha256: str) -> bytes | None:
        del sha256  # no model is called
        return None

    async def flush(self) -> None: ...

    async def close(self) -> None: ...


class _UnaskedModel:
    def __init__(self, journal: _ReplayJournal) -> None:
        self._journal = journal

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        del tools
        last = messages[-1].content if messages else None
        found = _unrecorded("a model call", "a request whose answer is not recorded", last or "")
        self._journal.report(found, is_at_end=True)


class _UnaskedMemory:
    def __init__(self, journal: _ReplayJournal) -> None:
        self._journal = journal

    async def recall(self, query: MemoryQuery) -> RecalledMemory:
        found = _between("its memory", "memory that was read and is not recorded", "", query.text)
        self._journal.report(found, is_at_end=True)

    async def remember(self, note: MemoryNote) -> RememberedNote:
        del note
        return RememberedNote()


def _describe_decision(decision: DelegationDecided) -> str:
    request, refusal = decision.request, decision.refusal
    asked = f"{as_text(request.get('agent_role'))}: {as_text(request.get('task_description'))}"
    reason = "refused" if refusal is None else refusal.reason
    return f"{asked} -> {reason if decision.worker is None else decision.worker}"


def _place_of(effect: str) -> str:
    """Return a readable form of a name such as `facts#0/2/call-1`."""
    _, turn, call = effect.rsplit("/", 2)
    return f"turn {turn}, {'model call' if call == 'model' else call.replace('-', ' ')}"


def _request_difference(
    journal: _ReplayJournal, name: str, messages: Sequence[ChatMessage], trace: TaskTrace | None
) -> Difference:
    """Compare a request with the recorded one, as far as the record contains its texts."""
    where = _place_of(name)
    recorded = [] if trace is None else _recorded_messages(journal, name, trace)
    for position, (message, (role, content)) in enumerate(zip(messages, recorded, strict=False), start=1):
        if (role, content or "") != (message.role, message.content or ""):
            what = f"message {position} ({message.role}) of the request"
            return _between(where, what, content or "", message.content or "")
    return Difference(
        where=where,
        what="the request",
        recorded="of another digest; its texts are not recorded (capture_mode keeps them)",
        current=_window(messages[-1].content or "" if messages else "", 0),
    )


def _recorded_messages(journal: _ReplayJournal, name: str, trace: TaskTrace) -> list[tuple[str, str | None]]:
    """Return the captured request, else rebuild it from the task's prompts, answers and results."""
    instance, number, _ = name.rsplit("/", 2)
    turn, prompts = int(number), trace.prompts
    if captured := [each for calls in trace.llm_interactions[turn : turn + 1] for each in calls.messages]:
        return [(each.role, each.content) for each in captured]
    if prompts is None:
        return []
    conversation: list[tuple[str, str | None]] = [
        ("system", prompts.system_prompt),
        *((each.role, each.content) for each in prompts.history),
        ("user", prompts.user_prompt),
    ]
    for previous in range(turn):
        answer = journal.find_recorded(f"{instance}/{previous}/model", ModelAnswered)
        if answer is None or not answer.tool_calls:
            return conversation[:1]  # a correction: only its system prompt is known
        conversation.append(("assistant", answer.text))
        for index in range(len(answer.tool_calls)):
            result = journal.find_recorded(f"{instance}/{previous}/call-{index}", ToolReturned)
            if result is None:
                return conversation
            conversation.append(("tool", result.text))
    return conversation


class _AskedQuestion(Struct, frozen=True, kw_only=True):
    """A recorded evaluation of a user's predicate or condition."""

    question: UntilHolds | EdgeMatches
    answered: Evaluated
    history: Sequence[HistoryEntry]  # passed to it


_Step = Union[Start, _AskedQuestion]  # noqa: UP007  a name for the union, also at run time


def _steps_of(plan: Plan, facts: Sequence[Fact], outputs: OutputStore) -> Iterator[_Step]:
    """Yield the steps of a run in its order; without units, the tasks in the order of the plan."""
    if not plan.units:
        yield from (Start(instance=instance_of(node.key)) for node in plan.nodes)
        return
    source = FoldedSource(plan)
    for group in RecordedStimuli(facts).numbered_groups:
        stimuli = [stimulus for _, stimulus in group]
        for stimulus in stimuli:
            if isinstance(stimulus, Evaluated) and stimulus.question in source.questions:
                question = stimulus.question
                if isinstance(question, UntilHolds | EdgeMatches):
                    yield _AskedQuestion(question=question, answered=stimulus, history=source.history_of(question))
        known = [each for each in stimuli if not isinstance(each, Completed) or each.instance in outputs]
        yield from (each for each in source.handle(known) if isinstance(each, Start))


class _RecordedPredicates:
    def __init__(self, units: Mapping[str, Loop | Phase | Graph], output_of: Callable[[str], TaskOutput]) -> None:
        self._predicates = LocalPredicates(list_predicates(units))
        self._output_of = output_of
        self._sent: dict[str, int] = {}  # sent parts of the history by unit path

    async def difference(self, asked: _AskedQuestion) -> Difference | None:
        question, sent = asked.question, self._sent.get(asked.question.unit, 0)
        parts = [
            HistoryPart(
                names=entry.names, outputs=tuple(map(self._output_of, entry.instances)), is_joined=entry.is_joined
            )
            for entry in asked.history[sent:]
        ]
        self._sent[question.unit] = sent + len(parts)
        answer = await self._predicates.holds(question, sent_count=sent, new=parts)
        answered = asked.answered
        recorded, current = _describe(answered if answered.answer is None else answered.answer), _describe(answer)
        if recorded == current:
            return None
        where, what = f"'{path_of_question(question)}'", "the answer of the predicate"
        if isinstance(question, EdgeMatches):
            where, what = f"{where}, edge {question.edge}", "the answer of the condition"
        return Difference(where=where, what=what, recorded=recorded, current=current)


def _describe(answer: object) -> str:
    if isinstance(answer, EvaluationFailed | Evaluated):
        return f"raised {answer.error_type}: {answer.message}"
    return str(answer).lower()


_STATUS = {OutputRecorded.KIND: "completed", FailureRecorded.KIND: "failed"}


class _ReplayedWorkers:
    def __init__(self, journal: _ReplayJournal, runner: TaskRunner) -> None:
        self._journal = journal
        self._runner = runner

    async def perform(self, order: TaskOrder) -> TaskResult:
        """Replay a worker's task; a difference is noted for the delegating task."""
        with self._journal.at(order.instance):
            result = await self._runner.run(order, is_stopped=lambda: False)
        call = delegating_call(order.instance) or order.instance
        end = self._journal.end_of(order.instance)
        found = self._journal.find_difference(order.instance)
        if found is not None:
            if self._journal.is_at_end(order.instance) and not self._journal.has_output(order.instance):
                return self._recorded_end(order, call, result, end, found)
            self._report(order, call, found)
        self._compare(order, call, result, end)
        told = self._journal.find_recorded(call, ToolReturned)
        if told is not None and not told.is_success and self._journal.has_output(order.instance):
            return _make_stopped(result, told)  # it had finished when it was stopped or its process was lost
        return result

    def stop(self, instances: Sequence[str]) -> None:
        """Ignore: a replay has no timeouts."""

    def _recorded_end(
        self, order: TaskOrder, call: str, result: TaskResult, end: Fact | None, found: Difference
    ) -> TaskResult:
        """Return the recorded end of a worker that has no output and reached the end of its record."""
        if end is not None and isinstance(end.data, ExitRecorded):
            return _make_end(result, "exited", exit_of(end.data.reason))
        if end is not None and isinstance(end.data, FailureRecorded):
            return _make_end(result, "failed", error_from(end.data.error_data))
        recorded_result = self._journal.find_recorded(call, ToolReturned)
        if recorded_result is None:  # the run died while the worker was running
            self._report(order, call, found, is_at_end=True)
        return _make_stopped(result, recorded_result)  # or its process was lost

    def _compare(self, order: TaskOrder, call: str, result: TaskResult, end: Fact | None) -> None:
        if end is None:
            return
        recorded = end.data.read().raw if isinstance(end.data, OutputRecorded) else None
        current = None if result.output is None else result.output.raw
        what = "the output"
        if current is None or recorded is None:
            what, recorded = "the end", _STATUS.get(end.kind, "exited")
            current = result.status
        if recorded != current:
            self._report(order, call, _between("its end", what, recorded, current))

    def _report(self, order: TaskOrder, call: str, found: Difference, *, is_at_end: bool = False) -> NoReturn:
        where = f"{_place_of(call)} ({order.agent_role}), {found.where}"
        asking = call.rsplit("/", 2)[0]
        self._journal.report(structs.replace(found, where=where), instance=asking, is_at_end=is_at_end)


def _make_stopped(result: TaskResult, told: ToolReturned) -> TaskResult:
    return structs.replace(
        _make_end(result, "failed", AgentExecutionError(told.text.removeprefix("Error: "))), output=None
    )


def _make_end(result: TaskResult, status: TaskStatus, error: BaseException) -> TaskResult:
    return structs.replace(result, status=status, failure=TaskFailure(error=error, trace=result.trace))


class Replay(Struct, frozen=True, kw_only=True):
    """The result of a replay; `str()` returns a readable report."""

    run_id: str
    difference: Difference | None
    tasks: int = 0
    effects: int = 0  # number of used model answers and tool results

    @property
    def is_same(self) -> bool:
        """Whether today's code behaves as recorded."""
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is not None:
            return f"Run '{self.run_id}' differs from today's code\n{self.difference}"
        return f"Run '{self.run_id}' is what today's code does: {self.tasks} tasks, {self.effects} recorded answers and results"


def replay(
    run: str | Run | EnsembleOutput,
    ensemble: Runnable | None = None,
    *,
    home: str | Path | None = None,
    store: str | None = None,
) -> Replay:
    """Replay a run on its record and compare it with today's code.

    Unrecorded steps, such as the rest of an interrupted task, are not compared. The replay calls guardrails, delegation
    policies, predicates of loops and conditions of graphs, because it checks them, too. Workers are replayed on their
    own records.

    Args:
        run: The run: its id, a prefix of the id, `latest`, its handle or its output.
        ensemble: Today's definition; None: loaded from the location in the run's record.
        home: Directory of the records; default: `ENSEMBLE_RAY_HOME` or the user's state directory.
        store: URL of a database that stores them instead; default: `ENSEMBLE_RAY_STORE`.

    Raises:
        ValidationError: the run does not exist, or its definition is unknown here.
        RecordError: its record is damaged or empty.
    """
    run_id = run if isinstance(run, str) else run.id if isinstance(run, Run) else run.run_id
    if not run_id:
        raise ValidationError("This output was made by hand and has no record to replay")
    return run_blocking(_replay(run_id, ensemble, StoreAddress.of(home, store)))


async def _replay(name: str, ensemble: Runnable | None, address: StoreAddress) -> Replay:
    store = store_at(address)
    found = await store.find(name)
    if (await read_head(store, found.run_id)).is_dynamic:
        raise ValidationError(
            f"Run '{found.run_id}' was a map-reduce whose tasks are made while it runs: there is no plan to replay. A resume "
            "with today's definition says whether it differs"
        )
    facts = await store.facts(found.run_id)
    with locate_errors(found.location):
        recorded = RunHistory(facts, has_details=True)
    header = recorded.head.header
    if header.is_empty:
        raise RecordError(
            f"Run '{found.run_id}' recorded no plan in {found.location}: there is nothing to replay", found.location
        )
    loaded = await threads.run(_definition, found, header) if ensemble is None else ensemble
    definition = planned_form(loaded)
    options = recorded_options(header)
    planned = await plan_again(definition.with_options(options), recorded_inputs(header), facts, header, is_replay=True)
    if changed := compare_fields(header.plan or {}, planned.plan.to_dict()):
        path, old, new = changed[0].path, changed[0].recorded, changed[0].current
        first = Difference(where="the plan", what=path, recorded=old, current=new)
        return Replay(run_id=found.run_id, difference=first)
    repetition = _Repetition(recorded, planned, facts, definition.with_options(options))
    difference = await repetition.difference()
    return Replay(run_id=found.run_id, difference=difference, tasks=repetition.tasks, effects=repetition.journal.used)


def _definition(found: RecordedRun, header: PlanRecorded) -> Runnable:
    source = origin_in(header)
    if not source.place:
        raise ValidationError(
            f"Run '{found.run_id}' was begun by a program, so its definition is not known here: "
            f"call replay('{found.run_id}', ensemble)"
        )
    return load_source(source, needs_keys=False)


class _Repetition:
    def __init__(self, recorded: RunHistory, planned: Planned, facts: Sequence[Fact], definition: Ensemble) -> None:
        self._recorded = recorded
        self._facts = facts
        self._planned = planned
        self._outputs: InMemoryOutputs[TaskOutput] = InMemoryOutputs()
        types = {key: each for key, task in planned.tasks.items() if (each := task.output_type) is not None}
        for instance, output in outputs_of(recorded, types).items():
            self._outputs.put(instance, output)
        self._nodes = {node.key: node for node in planned.plan.nodes}
        self.journal = _ReplayJournal(facts)
        self.tasks = 0
        self._policies = definition.delegation_policies
        context = run_context_of(
            definition, planned, run_id=facts[0].run, interest=frozenset(), capture_mode=CaptureMode.OFF, log_fields={}
        )
        unlimited = replace(context.delegation, timeout_s=None)
        self._context = structs.replace(
            context, on_unknown="fail", retry=None, is_verbose=False, delegation=unlimited, deps=None
        )

    async def difference(self) -> Difference | None:
        """Return the first difference in the order of the plan; with units, in the order of the run."""
        cpu = LokyCpuPool()
        ports = RunnerPorts(
            clock=SystemClock(),
            journal=self.journal,
            events=RecordingSink(),
            callables=LocalCallables(self._planned.tasks, self._policies),
            services=Services(limiter=process_limiter(), cpu=cpu),
            tool_metrics=NoOpToolMetrics(),
            compare=self._compare,
            memory=_UnaskedMemory(self.journal),
        )
        agents = {key: agent.rewritten(llm=_UnaskedModel(self.journal)) for key, agent in self._planned.agents.items()}
        runner = TaskRunner(self._context, ports, agents)
        runner.peers = _ReplayedWorkers(self.journal, runner)
        predicates = _RecordedPredicates(self._planned.units, self._outputs.get)
        try:
            for step in _steps_of(self._planned.plan, self._facts, self._outputs):
                if isinstance(step, _AskedQuestion):
                    found = await predicates.difference(step)
                elif step.instance in self._recorded.work:
                    self.tasks += 1
                    found = await self._of_task(runner, step)
                else:
                    continue
                if found is not None:
                    return found
        finally:
            cpu.close()
        return None

    async def _of_task(self, runner: TaskRunner, start: Start) -> Difference | None:
        order = self._order(start)
        with self.journal.at(order.instance):
            result = await runner.run(order, is_stopped=lambda: False)
        where = f"task '{order.instance if is_inside_unit(order.instance) else order.key}'"
        # Or it waits at its gate as before.
        has_stopped = self.journal.is_at_end(order.instance) or result.status == "waiting"
        if has_stopped and not self.journal.has_output(order.instance):
            return None
        found = self.journal.find_difference(order.instance)
        return self._ending(where, result) if found is None else structs.replace(found, where=f"{where}, {found.where}")

    def _ending(self, where: str, result: TaskResult) -> Difference | None:
        instance = result.instance
        if instance not in self._outputs:
            end = self.journal.end_of(instance)
            if end is None or (isinstance(end.data, ExitRecorded) and end.data.reason is ExitReason.BUDGET_EXHAUSTED):
                return None  # it was interrupted
            if not isinstance(end.data, FailureRecorded):
                return _first(where, ("the end", "exited", result.status))
            errors = ("the error", _describe_error(error_from(end.data.error_data)), _describe_error(result.error))
            return _first(where, ("the end", "failed", result.status), errors)
        recorded, current_output = self._outputs.get(instance), result.output
        if current_output is None:
            ending = f"{result.status}, {_describe_error(result.error)}"
            return Difference(where=where, what="the end", recorded="completed", current=ending)
        return _first(
            where,
            ("the output", recorded.raw, current_output.raw),
            ("the parsed output", jsonable(recorded.parsed_output), jsonable(current_output.parsed_output)),
        )

    def _order(self, start: Start) -> TaskOrder:
        task = self._planned.tasks[node_key(start.instance)]
        order = make_order(
            start,
            self._nodes,
            TaskBody(task, len(task.input_guardrails), len(task.output_guardrails)),
            self._outputs,
            run_id=self._context.run_id,
            epoch=1,  # so that the runner reads the record
            is_sequential=self._planned.plan.workflow == "sequential",
        )
        return structs.replace(order, is_streaming=False)

    def _compare(self, name: str, fact: Fact[ModelAnswered], digest: str, messages: Sequence[ChatMessage]) -> None:
        if fact.data.request_digest != digest:
            instance = name.rsplit("/", 2)[0]
            trace = RecordedWork(self._recorded, instance).recorded_trace()
            self.journal.report(_request_difference(self.journal, name, messages, trace), instance=instance)


def _describe_error(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _first(where: str, *pairs: tuple[str, object, object]) -> Difference | None:
    return next((_between(where, what, old, new) for what, old, new in pairs if old != new), None)
