"""Evaluates the questions of a planned run's units, and announces their iterations and steps.

Predicates receive the history since their unit's last question, or all of it in a new process (S-LOOP-54, S-LOOP-145).
A process that they share with a task evaluates them with it (S-LOOP-189).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeVar, cast, overload

from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.definition.graph import Graph, GraphEdge
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.phase import Phase
from ensemble_ray.errors import IllegalStateError
from ensemble_ray.errors.texts import user_exc_info
from ensemble_ray.events import GraphStateCompletedEvent, LoopIterationCompletedEvent
from ensemble_ray.execute.orders import EvaluationFailed, FollowingQuestions, HistoryPart
from ensemble_ray.memory.tools import LocalRunMemory
from ensemble_ray.plan.plan import GraphUnit, LoopUnit, Plan, Unit
from ensemble_ray.process.concurrency import USER_ERRORS, call_user
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.runs.coordinator import MemoryResets, Predicates, RunBackgroundTasks
from ensemble_ray.runs.outputs import OutputStore
from ensemble_ray.schedule.instructions import (
    EdgeMatches,
    IterationEnded,
    Question,
    ResetMemory,
    Start,
    StepEnded,
    UnitQuestion,
    UntilHolds,
)
from ensemble_ray.schedule.machine import PlanSource
from ensemble_ray.schedule.stimuli import Evaluated, Stimulus
from ensemble_ray.values.ids import instance_of, node_key
from ensemble_ray.values.memory import ScopeReset
from ensemble_ray.values.task_output import GraphRoutingContext, LoopIterationContext, TaskOutput, join_iterations


def instances_of(what: IterationEnded | StepEnded) -> tuple[str, ...]:
    return what.instances if isinstance(what, IterationEnded) else what.output.instances


def build_announcement(
    run_id: str, unit: Unit, what: IterationEnded | StepEnded, outputs: Sequence[TaskOutput]
) -> LoopIterationCompletedEvent | GraphStateCompletedEvent:
    """Return the event of a loop or graph (S-LOOP-108, S-GRAPH-75); `outputs` are those of `instances_of`."""
    if isinstance(what, IterationEnded) and isinstance(unit, LoopUnit):
        names = dict(zip(unit.body, unit.body_names, strict=True))
        given = zip(what.instances, outputs, strict=True)
        return LoopIterationCompletedEvent(
            run_id=run_id,
            instance=instance_of(what.unit, occurrence=what.iteration - 1),
            loop_name=unit.name,
            iteration_number=what.iteration,
            max_iterations=unit.max_iterations,
            iteration_outputs={names[node_key(instance)]: output for instance, output in given},
            iteration_duration=timedelta(seconds=what.duration_s),
        )
    if not isinstance(what, IterationEnded) and isinstance(unit, GraphUnit):
        output = join_iterations(outputs) if what.output.is_joined else outputs[-1]
        return GraphStateCompletedEvent(
            run_id=run_id,
            instance=instance_of(what.unit, occurrence=what.step - 1),
            graph_name=unit.name,
            state_name=what.state,
            step_number=what.step,
            max_steps=unit.max_steps,
            output=output,
            next_state=what.next_state,
            step_duration=timedelta(seconds=what.duration_s),
        )
    raise TypeError(f"{what} is nothing that {unit} does")


_log = bounded_logger(__name__)


class UnitPorts(Struct, frozen=True, kw_only=True):
    predicates: Predicates
    lives_with: Callable[[str | None], bool] = lambda _: False  # with tasks of an agent; None: with handlers
    announce: Callable[[IterationEnded | StepEnded, Sequence[Any]], None]  # to listeners; never waits
    failure_of: Callable[[EvaluationFailed], Any]  # converts an error to the run's form of failures
    memory: MemoryResets | None = None  # None: no memory
    log: Callable[[int, str], None] | None = None  # (level, text); None: this process's log


class UnitEvaluations:
    """The questions and announcements of one run; `open` comes first."""

    def __init__(self, plan: Plan, source: PlanSource, outputs: OutputStore, ports: UnitPorts) -> None:
        self._loops = {unit.key: unit for unit in plan.units if isinstance(unit, LoopUnit)}
        self._source = source
        self._outputs = outputs
        self._ports = ports
        self._notify: Callable[[Stimulus], None]
        self._break_off: Callable[[BaseException], None]
        self._now: Callable[[], float]
        self._background: RunBackgroundTasks | None = None
        self._sent: dict[str, int] = {}  # by unit path: history parts that the predicates have
        #: by instance: questions for the process of that task, and the length of the unit's history then
        self._foreseen: dict[str, tuple[tuple[UnitQuestion, ...], int]] = {}
        #: answers before their questions, and the length of the unit's history
        self._verdicts: dict[UnitQuestion, tuple[bool | EvaluationFailed, int]] = {}
        self.raised: list[tuple[str, Any]] = []  # errors of user code by unit path, in order

    def open(
        self, notify: Callable[[Stimulus], None], break_off: Callable[[BaseException], None], now: Callable[[], float]
    ) -> None:
        """`notify` receives answers, `break_off` an error that ends the run."""
        self._notify, self._break_off, self._now = notify, break_off, now

    def ask(self, question: Question) -> None:
        """Evaluate a question, and notify the source; never waits."""
        match question:
            case UntilHolds() | EdgeMatches():
                if (answered := self._verdicts.pop(question, None)) is not None:
                    verdict, self._sent[question.unit] = answered
                    self._answer(question, verdict)
                    return
                self._drop_ended()
                work = self._ask_predicate(question, self._length(question.unit))
            case ResetMemory():

                async def reset_memory() -> None:
                    unit = self._loops[node_key(f"{question.unit}#0")]
                    if self._ports.memory is None:
                        raise IllegalStateError(f"loop '{unit.name}' has memory scopes, and the run has no memory")
                    self._answer(question, await self._ports.memory.reset(unit) or True)

                work = reset_memory()
            case _:
                raise TypeError(f"a planned run has no code that answers {question}")
        if self._background is None:
            self._background = RunBackgroundTasks(self._break_off)
        self._background.start(work)

    def questions_after(self, start: Start, agent_key: str | None) -> FollowingQuestions[Any] | None:
        """Return the questions that a task's process answers after the task."""
        after = start.asks_after
        if after is None or not self._ports.lives_with(agent_key):
            return None
        unit = after.questions[0].unit
        self._drop_ended()
        sent_count, length = self._sent.get(unit, 0), self._length(unit)
        earlier = tuple(self._outputs.get(instance) for instance in after.instances[:-1])
        self._foreseen[start.instance] = (after.questions, length + 1)
        return FollowingQuestions(
            questions=after.questions,
            sent_count=sent_count,
            new=(*self._history(unit, sent_count, length), HistoryPart(names=after.names, outputs=earlier)),
        )

    def keep_verdicts(self, instance: str, verdicts: Sequence[bool | EvaluationFailed]) -> None:
        """Store the answers in a task's result, until the source asks the questions."""
        foreseen = self._foreseen.pop(instance, None)
        if foreseen is not None and verdicts:
            questions, length = foreseen
            # There are fewer answers if one was True or takes long.
            self._verdicts.update((each, (came, length)) for each, came in zip(questions, verdicts, strict=False))

    def announce(self, what: IterationEnded | StepEnded) -> None:
        self._ports.announce(what, [self._outputs.get(instance) for instance in instances_of(what)])

    def log_start(self, instance: str) -> None:
        """Log the start of a loop's iteration at its first task (S-LOOP-132)."""
        iteration = instance.rpartition("/")[0]
        unit = self._loops.get(node_key(iteration))
        if unit is not None and node_key(instance) == unit.body[0]:
            number = int(iteration.rpartition("#")[2]) + 1
            _log.debug("Loop '%s' starts iteration %d/%d", unit.name, number, unit.max_iterations)

    def detach(self) -> None:
        if self._background is not None:
            self._background.detach()

    async def _ask_predicate(self, question: UnitQuestion, length: int) -> None:
        unit = question.unit
        sent_count = self._sent.get(unit, 0)
        verdict = await self._ports.predicates.holds(
            question, sent_count=sent_count, new=self._history(unit, sent_count, length)
        )
        if verdict is None:
            verdict = await self._ports.predicates.holds(question, sent_count=0, new=self._history(unit, 0, length))
        if verdict is None:
            raise IllegalStateError(f"the predicates of '{unit}' lost the history that they just received")
        self._sent[unit] = length
        self._answer(question, verdict)

    def _answer(self, question: UnitQuestion | ResetMemory, answer: bool | EvaluationFailed) -> None:  # noqa: FBT001
        evaluated = Evaluated(
            at=self._now(), question=question, answer=None if isinstance(answer, EvaluationFailed) else answer
        )
        if isinstance(answer, EvaluationFailed):
            self.raised.append((question.unit, self._ports.failure_of(answer)))
            evaluated = replace(evaluated, error_type=answer.error_type, message=answer.message)
        self._notify(evaluated)

    def _length(self, unit: str) -> int:
        """Return the present length of a unit's history, which may grow while a predicate runs."""
        return len(self._source.history_of(unit))

    def _history(self, unit: str, begin: int, end: int) -> list[HistoryPart[Any]]:
        entries = self._source.history_of(unit)
        return [
            HistoryPart(
                names=entry.names,
                outputs=tuple(self._outputs.get(instance) for instance in entry.instances),
                is_joined=entry.is_joined,
            )
            for entry in (entries[position] for position in range(begin, min(end, len(entries))))
        ]

    def _drop_ended(self) -> None:
        for unit in [unit for unit in self._sent if not self._length(unit)]:
            del self._sent[unit]
            self._ports.predicates.drop(unit)


T = TypeVar("T")
_Asked = Callable[[object], object]


def predicate_path(question: UnitQuestion) -> str:
    """Return a predicate's name, such as `graph:triage/edge/3`, for all executions of a unit."""
    key = question.unit.rpartition("/")[2]
    return f"{key}/until/0" if isinstance(question, UntilHolds) else f"{key}/edge/{question.edge}"


def list_predicates(units: Mapping[str, Loop | Phase | Graph]) -> dict[str, object]:
    """Return predicates of loops and conditions of edges, by path."""
    found: dict[str, object] = {}
    for key, unit in units.items():
        if isinstance(unit, Loop) and unit.until is not None:
            found[f"{key}/until/0"] = unit.until
        elif isinstance(unit, Graph):
            conditions = {n: edge.condition for n, edge in enumerate(unit.edges) if isinstance(edge, GraphEdge)}
            found.update({f"{key}/edge/{n}": each for n, each in conditions.items() if each is not None})
    return found


class LocalPredicates:
    """Predicates in this process. Fulfils `Predicates` with outputs as objects."""

    def __init__(self, predicates: Mapping[str, object]) -> None:
        self._predicates = predicates
        self._histories: dict[str, _History] = {}  # by unit path

    async def holds(
        self, question: UnitQuestion, *, sent_count: int, new: Sequence[HistoryPart[TaskOutput]]
    ) -> bool | EvaluationFailed | None:
        """Call async code on the loop and sync code in a thread (S-CONV-16); log errors (S-LOOP-53)."""
        if not sent_count:
            self._histories[question.unit] = _History()
        history = self._histories.get(question.unit)
        if history is None or len(history.parts) < sent_count:
            return None
        for part in new[max(0, len(history.parts) - sent_count) :]:
            history.add(part)
        path = predicate_path(question)
        try:
            asked = cast("_Asked", self._predicates[path])
            return bool(await call_user(asked, history.view(question)))
        except USER_ERRORS as error:
            _log.error("The predicate '%s' raised", path, exc_info=user_exc_info(error))
            note = f"raised by the predicate '{path}', asked about '{question.unit}'"
            if note not in getattr(error, "__notes__", ()):  # the same object may be raised repeatedly
                error.add_note(note)
            return EvaluationFailed.of(error)

    def drop(self, unit: str) -> None:
        self._histories.pop(unit, None)


class _History:
    """The history of a unit for its predicates."""

    def __init__(self) -> None:
        self.parts: list[Mapping[str, TaskOutput]] = []
        self._lasts: list[TaskOutput] = []
        self._visits: dict[str, Sequence[TaskOutput]] = {}  # of a graph: state -> outputs in order of visits
        self._outputs: dict[str, list[TaskOutput]] = {}

    def add(self, part: HistoryPart[TaskOutput]) -> None:
        given = (join_iterations(part.outputs),) if part.is_joined else part.outputs
        self.parts.append(MappingProxyType(dict(zip(part.names, given, strict=True))))
        self._lasts.append(given[-1])
        if len(part.names) == 1:
            state = part.names[0]
            visits = self._outputs.setdefault(state, [])
            visits.append(given[0])
            self._visits[state] = _View(visits)

    def view(self, question: UnitQuestion) -> LoopIterationContext | GraphRoutingContext:
        last = self._lasts[-1]
        if isinstance(question, UntilHolds):
            return LoopIterationContext(
                iteration_number=question.iteration,
                last_iteration_outputs=self.parts[-1],
                history=_View(self.parts),
                last_body_output=last,
            )
        return GraphRoutingContext(
            current_state=next(iter(self.parts[-1])),
            last_output=last,
            step_number=question.step,
            state_history=MappingProxyType(self._visits),
        )


class _View(Sequence[T]):
    """Current entries of a growing list, without a copy."""

    def __init__(self, entries: Sequence[T]) -> None:
        self._entries = entries
        self._length = len(entries)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...

    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._entries[position] for position in range(self._length)[index]]
        return self._entries[range(self._length)[index]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(cast("Sequence[object]", other))

    def __hash__(self) -> int:
        raise TypeError("a history is not hashable")

    def __repr__(self) -> str:
        return repr(list(self))


class LocalMemoryResets:
    """Fulfils `MemoryResets`."""

    def __init__(self, memory: LocalRunMemory) -> None:
        self._memory = memory

    async def reset(self, unit: LoopUnit) -> EvaluationFailed | None:
        if unit.memory_mode == "accumulate":
            return None
        reset = ScopeReset(
            loop=unit.name, mode=unit.memory_mode, scopes=unit.memory_scopes, window_size=unit.memory_window_size
        )
        try:
            await self._memory.reset(reset)
        except USER_ERRORS as error:
            return EvaluationFailed.of(error)
        return None
