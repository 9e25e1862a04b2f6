"""The recorded stimuli of a planned run, and its source, which receives them again (S-DUR-30). Pure.

The same stimuli produce the same instructions, so a replayed source has the requests and the state of the run's source.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from ensemble_ray.errors import RecordError
from ensemble_ray.facts.fact import Fact, as_count, as_mapping, as_sequence, as_text
from ensemble_ray.facts.runs import PlanRecorded, RunResumed, StimulusRecorded
from ensemble_ray.plan.plan import AgentEntry, HierarchyRules, Node, Plan
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import (
    EdgeMatches,
    Evaluate,
    Instruction,
    Question,
    ResetMemory,
    Start,
    UntilHolds,
)
from ensemble_ray.schedule.machine import PlanSource
from ensemble_ray.schedule.stimuli import (
    Cancelled,
    CancelRequested,
    Continued,
    Evaluated,
    Exited,
    Stimulus,
    Waiting,
    decode_stimulus,
)
from ensemble_ray.schedule.unit import HistoryEntry
from ensemble_ray.values.outputs import ExitReason


class RecordedStimuli:
    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self.numbered: list[list[tuple[int, Stimulus]]] = []
        self.is_open = False  # whether more of the last group follows
        self._is_waiting = False  # whether tasks wait at gates since the run was resumed last
        self.take(facts)

    def take(self, facts: Iterable[Fact]) -> None:
        """Apply the next facts; all except stimuli and resumptions are ignored."""
        for fact in facts:
            if isinstance(fact.data, StimulusRecorded):
                self.apply(cast("Fact[StimulusRecorded]", fact))
            elif isinstance(fact.data, RunResumed):
                self.resume(cast("Fact[RunResumed]", fact))

    def apply(self, fact: Fact[StimulusRecorded]) -> Stimulus | None:
        stimulus = read_stimulus(fact)
        if not self.is_open:
            self.numbered.append([])
        if stimulus is not None:
            self.numbered[-1].append((fact.seq, stimulus))
        self.is_open = bool(fact.data.more)
        self._is_waiting = self._is_waiting or isinstance(stimulus, Waiting)
        return stimulus

    def resume(self, fact: Fact[RunResumed]) -> None:
        """Apply a resumption. It is no recorded stimulus, but restarts the tasks that waited at gates."""
        if not fact.data.is_restart:  # after a restart of the scheduler only, a cancelled run is still cancelled
            self.undo()
        if self._is_waiting:
            self.numbered.append([(fact.seq, Continued(at=fact.at))])
            self.is_open = self._is_waiting = False

    def undo(self) -> None:
        """Drop stimuli that a resumed run reverts: cancellations, and exits because of a spent budget."""
        for group in self.numbered:
            group[:] = [each for each in group if not is_undone(each[1])]

    @property
    def numbered_groups(self) -> list[list[tuple[int, Stimulus]]]:
        """The stimuli by group with the positions of their facts; the end of the last group may be missing."""
        return [group for group in self.numbered if group]

    @property
    def groups(self) -> tuple[tuple[Stimulus, ...], ...]:
        return tuple(tuple(stimulus for _, stimulus in group) for group in self.numbered_groups)


def read_stimulus(fact: Fact[StimulusRecorded]) -> Stimulus | None:
    try:
        return decode_stimulus(fact)
    except TypeError as error:
        raise RecordError(f"The record is damaged: stimulus {fact.seq}: {error}") from error


class ReplayedSource:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.source: PlanSource = machine_for(plan)
        self._stimuli = RecordedStimuli()

    def handle(self, stimuli: Sequence[Stimulus]) -> list[Instruction]:
        """Stimuli that arrived together. Those that no longer apply are ignored.

        A `Cancelled` task counts only if the source requested it, as a join of a graph does.
        """
        known = [
            each for each in stimuli if not isinstance(each, Cancelled) or self.source.is_cancelling(each.instance)
        ]
        return self.source.handle(*known) if known else []

    def apply(self, fact: Fact[StimulusRecorded]) -> list[Instruction]:
        """Apply the next stimulus. Return the source's instructions; none inside a group."""
        self._stimuli.apply(fact)
        return [] if self._stimuli.is_open else self._handle_group(self._stimuli.numbered[-1])

    def resume(self, fact: Fact[RunResumed]) -> list[Instruction]:
        count = len(self._stimuli.numbered)
        self._stimuli.resume(fact)
        if fact.data.is_restart:
            new = self._stimuli.numbered[count:]
        else:
            self.source, new = machine_for(self._plan), self._stimuli.numbered
        return [instruction for group in new for instruction in self._handle_group(group)]

    def _handle_group(self, group: Sequence[tuple[int, Stimulus]]) -> list[Instruction]:
        return self.handle([stimulus for _, stimulus in group])


class FoldedSource(ReplayedSource):
    def __init__(self, plan: Plan) -> None:
        """Set no limit of parallel tasks, so that the timing of tasks has no effect."""
        super().__init__(replace(plan, max_parallel_tasks=None))
        self.starts: dict[str, Start] = {}
        self.questions: dict[Question, int] = {}  # open ones, each with the length of its unit's history then

    def handle(self, stimuli: Sequence[Stimulus]) -> list[Instruction]:
        """Apply stimuli that arrived together; answers to questions that are not open are ignored, too."""
        known = [each for each in stimuli if not isinstance(each, Evaluated) or each.question in self.questions]
        for stimulus in known:
            if isinstance(stimulus, Evaluated):
                del self.questions[stimulus.question]
        wanted = super().handle(known)
        for instruction in wanted:
            match instruction:
                case Start(instance=instance):
                    self.starts[instance] = instruction
                case Evaluate(question=question):
                    self.questions[question] = len(self.source.history_of(_unit_of(question)))
                case _:
                    pass
        return wanted

    def history_of(self, question: Question) -> Sequence[HistoryEntry]:
        return self.source.history_of(_unit_of(question))[: self.questions[question]]


def _unit_of(question: Question) -> str:
    return question.unit if isinstance(question, UntilHolds | EdgeMatches | ResetMemory) else ""


def path_of_question(question: Question) -> str:
    """Return the execution that a question is about: an iteration, a step, or, for memory, the next iteration.

    Examples:
        >>> path_of_question(UntilHolds(unit="loop:refine", iteration=1))
        'loop:refine#0'
    """
    match question:
        case UntilHolds() | ResetMemory():
            return f"{question.unit}#{question.iteration - 1}"
        case EdgeMatches():
            return f"{question.unit}#{question.step - 1}"
        case _:
            raise TypeError(f"{question} is of no unit")


def is_undone(stimulus: Stimulus) -> bool:
    """Whether a resumed run reverts a stimulus: a cancellation, or a spent budget (S-DUR-35, S-BUD-6)."""
    if isinstance(stimulus, Exited):
        return stimulus.reason is ExitReason.BUDGET_EXHAUSTED
    return isinstance(stimulus, CancelRequested)


def recorded_plan(data: Mapping[str, object]) -> Plan:
    try:
        return Plan.from_dict(cast("Mapping[str, None]", data))
    except ValueError as error:
        raise RecordError(f"The record is damaged: its plan cannot be read: {error}") from error


def readable_plan(header: PlanRecorded) -> Plan:
    """Return a recorded plan; if it is damaged, its readable tasks and agents; without a plan, one without tasks."""
    data = {} if header.is_dynamic else header.plan or {}
    if data:
        with contextlib.suppress(RecordError):
            return recorded_plan(data)
    rules = as_mapping(data.get("hierarchy"))
    return Plan(
        workflow=as_text((header.plan or {}).get("workflow"), "unknown"),
        nodes=tuple(_readable_node(as_mapping(each)) for each in as_sequence(data.get("nodes"))),
        agents=tuple(
            AgentEntry(key=as_text(agent.get("key")), role=as_text(agent.get("role")), goal="")
            for agent in map(as_mapping, as_sequence(data.get("agents")))
        ),
        hierarchy=HierarchyRules(required_workers=tuple(map(str, as_sequence(rules.get("required_workers")))))
        if data.get("hierarchy")
        else None,
        shown_as=as_text(data.get("shown_as")) or None,
    )


def _readable_node(data: Mapping[str, object]) -> Node:
    key = as_text(data.get("key"))
    return Node(
        key=key,
        index=as_count(data.get("index")),
        description=as_text(data.get("description"), key),
        expected_output=as_text(data.get("expected_output")),
        agent_role=as_text(data.get("agent_role")),
        agent_key=None if data.get("agent_key", "") is None else as_text(data.get("agent_key")),
        node_type=as_text(data.get("node_type")) or None,
        level=level if isinstance(level := data.get("level"), int) else None,
    )
