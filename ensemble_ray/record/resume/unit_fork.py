"""What a fork of a run with loops, phases or a graph uses of its record. Pure (S-DUR-120, S-DUR-130 to S-DUR-134).

Rules:
1. Two sources are told what is recorded: one of the recorded plan everything, one of today's plan what the fork uses.
2. What belongs to the named execution is not told to the second one. So nothing that follows from it starts there.
3. A task's end is used where both sources want that task started with the same context: then it would be given the same.
4. An answer of user code is used where both sources ask the same question about the same history.
5. Failures, and that the run was cancelled or exited early, are not used: the fork does better.
6. Numbers of iterations, attempts and steps that a fork may make are its own: a cap that is moved undoes nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ensemble_ray.errors import ValidationError
from ensemble_ray.facts.effects import is_making_agent
from ensemble_ray.facts.ends import OutputRecorded
from ensemble_ray.record.resume.folded_source import FoldedSource, numbered_groups, path_of_question
from ensemble_ray.record.resume.fork import ForkPlan
from ensemble_ray.record.view.units import is_named
from ensemble_ray.schedule.instructions import Question, Start, TaskChanges
from ensemble_ray.schedule.stimuli import Begun, Cancelled, Completed, Evaluated, Exited, Stimulus
from ensemble_ray.values.ids import key_of, node_key, task_instance

if TYPE_CHECKING:
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.plan.plan import Plan

_NAMED = 20


def plan_unit_fork(recorded: Plan, plan: Plan, facts: Sequence[Fact], run_id: str, name: str) -> ForkPlan:
    """Part the executions of a run into those that a fork uses and those that are done again.

    Args:
        recorded: The plan that ran.
        plan: What would run today.
        facts: All of the run.
        run_id: Its id.
        name: From where on it is done again: a task or a unit, or one execution of it, such as `loop:refine#2`.

    Raises:
        ValidationError: the run has nothing of that name.
        RecordError: the record is damaged.
    """
    executions = _executions(facts)
    _check_name(plan, executions, run_id, name)
    outputs = {fact.name for fact in facts if isinstance(fact.data, OutputRecorded)}
    cut = _Cut(recorded, plan, outputs, name)
    for group in numbered_groups(facts):
        cut.apply(group)
    kept = cut.list_kept()
    left = [each for each in executions if each not in kept]
    used = {node_key(each) for each in kept}
    again = [*_shortest(left, kept)]
    # What never ran, and units that go on behind what is recorded of them.
    open_paths = [*cut.open_paths(kept)]
    again += [
        key
        for key in plan.top_level
        if not _has_run(key, executions) or (_has_run(key, open_paths) and not _has_run(key, left))
    ]
    return ForkPlan(
        reused=tuple(_shortest(kept, left)),
        again=tuple(again),
        keys=tuple(node.key for node in plan.nodes if node.key in used),
        instances=frozenset(kept),
        stimuli=cut.stimuli,
        units=frozenset(unit.key for unit in recorded.units if any(_has_run(unit.key, [each]) for each in kept)),
    )


# Names.


def _executions(facts: Iterable[Fact]) -> dict[str, None]:
    """Return the executions of tasks that are recorded, in the order in which they began."""
    names = (fact.instance for fact in facts if not (fact.is_of_run or is_making_agent(fact)))
    return dict.fromkeys(task_instance(name) for name in names if "#" in name)


def _paths(instance: str) -> Iterator[str]:
    """Return the executions that one is inside of, outermost first, and itself."""
    parts = instance.split("/")
    yield from ("/".join(parts[:count]) for count in range(1, len(parts) + 1) if "#" in parts[count - 1])


def _check_name(plan: Plan, executions: Collection[str], run_id: str, name: str) -> None:
    keys = [*(node.key for node in plan.nodes), *(unit.key for unit in plan.units)]
    if name in keys or any(is_named(name, each) for each in executions):
        return
    known = dict.fromkeys([*plan.top_level, *(path for each in executions for path in _paths(each) if "/" in each)])
    near = difflib.get_close_matches(name, [*known, *keys], n=3, cutoff=0.6)
    listed = [*known][:_NAMED]
    more = f" and {len(known) - _NAMED} more, which ensemble-ray trace {run_id} shows" if len(known) > _NAMED else ""
    nearest = f" Nearest: [{', '.join(near)}]." if near else ""
    raise ValidationError(
        f"Run '{run_id}' has no task, unit or execution '{name}'.{nearest} There are: [{', '.join(listed)}]{more}"
    )


def _has_run(key: str, executions: Iterable[str]) -> bool:
    return any(is_named(key, path) for each in executions for path in _paths(each))


def _shortest(executions: Iterable[str], others: Iterable[str]) -> dict[str, None]:
    """Return names of executions, of such that contain none of the others the outermost."""
    taken = {path for each in others for path in _paths(each)}
    names = (next((path for path in _paths(each) if path not in taken), each) for each in executions)
    return dict.fromkeys(name if "/" in name or ":" in name else key_of(name) for name in names)


@dataclass(slots=True)
class _Cut:
    """The two sources, group by group."""

    recorded: Plan
    plan: Plan
    #: instances whose output is recorded
    outputs: Collection[str]
    name: str
    #: by number of a stimulus' fact that is used: how many of its group follow
    stimuli: dict[int, int] = field(default_factory=dict[int, int])
    _then: FoldedSource = field(init=False)
    _now: FoldedSource = field(init=False)
    _kept: dict[str, None] = field(default_factory=dict[str, None])

    def __post_init__(self) -> None:
        self._then, self._now = FoldedSource(self.recorded), FoldedSource(self.plan)

    def apply(self, group: Sequence[tuple[int, Stimulus]]) -> None:
        """Apply to both sources what concerns them of a group."""
        used = [(seq, stimulus) for seq, stimulus in group if self._is_used(stimulus)]
        self._then.apply([stimulus for _, stimulus in group])
        if not used:
            return
        self._now.apply([stimulus for _, stimulus in used])
        ends = (stimulus for _, stimulus in used if isinstance(stimulus, Completed | Exited | Cancelled))
        self._kept.update(dict.fromkeys(end.instance for end in ends))
        for more, (seq, stimulus) in zip(range(len(used) - 1, -1, -1), used, strict=True):
            if not isinstance(stimulus, Begun):  # a fork has a beginning of its own
                self.stimuli[seq] = more

    def _is_used(self, stimulus: Stimulus) -> bool:
        match stimulus:
            case Begun():
                return True
            case Completed():
                return self._is_output_used(stimulus.instance)
            case Exited():
                return stimulus.has_output and self._is_output_used(stimulus.instance)
            case Cancelled():  # as a join does with branches that it needs no more
                return self._now.source.is_cancelling(stimulus.instance) and not is_named(self.name, stimulus.instance)
            case Evaluated():
                return stimulus.answer is not None and self._is_answer_used(stimulus.question)
            case _:
                return False

    def _is_output_used(self, instance: str) -> bool:
        if instance not in self.outputs or self._is_repeated(instance) or not self._now.source.is_running(instance):
            return False
        return _plain(self._now.starts.get(instance)) == _plain(self._then.starts.get(instance))

    def _is_answer_used(self, question: Question) -> bool:
        if (
            self._is_repeated(path_of_question(question))
            or question not in self._now.questions
            or question not in self._then.questions
        ):
            return False
        return self._now.history_of(question) == self._then.history_of(question)

    def _is_repeated(self, path: str) -> bool:
        """Whether a task, or an answer about an execution, belongs to what is done again."""
        return path == self.name or is_named(self.name, path)

    def list_kept(self) -> dict[str, None]:
        """Return the executions that are used: those that were told, and those whose end nobody had heard of."""
        unheard = [each for each in self._now.source.running if each in self.outputs and self._is_output_used(each)]
        return {**self._kept, **dict.fromkeys(unheard)}

    def open_paths(self, kept: Collection[str]) -> Iterator[str]:
        """Return what the fork begins with: tasks, and executions about which user code is asked."""
        yield from (instance for instance in self._now.source.running if instance not in kept)
        yield from map(path_of_question, self._now.questions)


def _plain(start: Start | None) -> Start | None:
    """Return what decides what a task gives; the words of feedback follow from outputs and caps."""
    if start is None or not isinstance(start.changes, TaskChanges):
        return start
    return replace(start, changes=replace(start.changes, feedback=""))
