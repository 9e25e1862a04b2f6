"""Divide the executions of a recorded run into reused and repeated executions of a fork. Pure (S-DUR-54, S-DUR-120).

A reused task must be defined as it was. The fork repeats its first task and the tasks without an output; also all later
tasks of a sequential run, or all dependents in a parallel run. `_Cut` has the rules for units (S-DUR-130 to S-DUR-134).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from msgspec import Struct, structs

from ensemble_ray.errors import ValidationError
from ensemble_ray.facts.effects import (
    DelegationDecided,
    MemoryRecalled,
    MemoryStored,
    ModelAnswered,
    ReflectionRecorded,
    SamplingAnswered,
    ValueRedacted,
    is_making_agent,
)
from ensemble_ray.facts.fact import Fact, as_mapping, as_sequence, as_text
from ensemble_ray.facts.runs import OutputRecorded, PlanRecorded, StimulusRecorded
from ensemble_ray.plan.plan import Plan
from ensemble_ray.plan.unit_plans import SYNTHESIZED
from ensemble_ray.record.identity.definition import differences
from ensemble_ray.record.source import FoldedSource, RecordedStimuli, path_of_question
from ensemble_ray.record.view.tree import is_named
from ensemble_ray.schedule.instructions import Start, TaskChanges
from ensemble_ray.schedule.stimuli import Begun, Cancelled, Completed, Evaluated, Exited, Stimulus
from ensemble_ray.values.ids import RUN, instance_of, key_of, node_key, task_instance

_BY_WHOM = ("agent_role", "agent_key")
_RULES = ("workflow",)
#: Limits of units and their consequences: a change reverts no execution.
_CAPS = frozenset(
    {
        "max_iterations",
        "on_max_iterations",
        "max_tokens",
        "max_steps",
        "on_max_steps",
        "max_retries",
        "max_predecessor_retries",
    }
)
_NAMED = 20


class ForkPlan(Struct, frozen=True, kw_only=True):
    reused: tuple[str, ...]  # for users: tasks in the plan's order; with units, executions in the record's order
    again: tuple[str, ...]
    keys: tuple[str, ...]  # tasks with a reused execution, in the order of the plan
    instances: frozenset[str]
    #: for a run with units: positions of the reused stimuli, with the number of stimuli that follow in the group.
    #: None: the ends of the reused tasks, each in its own group
    stimuli: Mapping[int, int] | None = None
    units: frozenset[str] = frozenset()


def plan_fork(plan: Plan, recorded: Collection[str], from_task: str) -> ForkPlan:
    keys = [node.key for node in plan.nodes]
    if from_task not in keys:
        near = difflib.get_close_matches(from_task, keys, n=3, cutoff=0.5)
        shown = ", ".join(near or keys[:10])
        raise ValidationError(f"Unknown task '{from_task}'. {'Nearest' if near else 'Tasks'}: [{shown}]")
    again = {from_task, *(key for key in keys if key not in recorded)}
    if plan.workflow == "parallel":
        again = _with_dependents(plan, again)
    else:
        again = set(keys[min(keys.index(key) for key in again) :])
    reused = tuple(key for key in keys if key not in again)
    return ForkPlan(
        reused=reused,
        again=tuple(key for key in keys if key in again),
        keys=reused,
        instances=frozenset(map(instance_of, reused)),
    )


def _with_dependents(plan: Plan, keys: set[str]) -> set[str]:
    dependents: dict[str, list[str]] = {}
    for node in plan.nodes:
        for needed in node.context:
            dependents.setdefault(needed, []).append(node.key)
    found, open_keys = set(keys), list(keys)
    while open_keys:
        for key in dependents.get(open_keys.pop(), ()):
            if key not in found:
                found.add(key)
                open_keys.append(key)
    return found


def reused_differences(
    recorded: PlanRecorded,
    current: PlanRecorded,
    reused: Sequence[str],
    *,
    asked: Collection[str] = (),
    units: Collection[str] = (),
) -> list[str]:
    """Return how definitions of reused tasks changed, one line per path.

    `asked` are the agents to which those tasks delegated work (`asked_agents`), `units` the units with a reused execution.
    Limits of units may differ.
    """
    unmade = {key for key, node in _entries(current, "nodes").items() if node.get("agent_role") == SYNTHESIZED}
    before, now = ({**_parts(header, reused, unmade, asked), **_units(header, units)} for header in (recorded, current))
    return differences(before, now)


def asked_agents(facts: Iterable[Fact], instances: Collection[str]) -> set[str]:
    return {
        fact.data.worker
        for fact in facts
        if isinstance(fact.data, DelegationDecided)
        and task_instance(fact.name) in instances
        and fact.data.worker is not None
    }


def _entries(header: PlanRecorded, part: Literal["nodes", "agents", "units"]) -> dict[str, Mapping[str, object]]:
    entries = map(as_mapping, as_sequence((header.plan or {}).get(part)))
    return {as_text(entry.get("key")): entry for entry in entries}


def _parts(
    header: PlanRecorded, keys: Sequence[str], unmade: Collection[str], asked: Collection[str]
) -> dict[str, object]:
    definition, nodes, places = header.definition or {}, _entries(header, "nodes"), _entries(header, "agents")
    tasks, agents = as_mapping(definition.get("tasks")), as_mapping(definition.get("agents"))
    doing = {as_text(nodes[key].get("agent_key")) for key in keys if key in nodes and key not in unmade} - {""}
    doing |= set(asked)
    rules = {"delegation": definition.get("delegation")} if asked else {}
    return {
        "tasks": {
            key: _without(nodes[key], {"index", *(_BY_WHOM if key in unmade else ())}) for key in keys if key in nodes
        },
        "definition": {key: tasks[key] for key in keys if key in tasks},
        "agents": {key: {**as_mapping(places.get(key)), **as_mapping(agents.get(key))} for key in sorted(doing)},
        "plan": {rule: (header.plan or {}).get(rule) for rule in _RULES},
        **rules,
    }


def _units(header: PlanRecorded, keys: Collection[str]) -> dict[str, object]:
    if not keys:
        return {}
    rules = _entries(header, "units")
    code = as_mapping((header.definition or {}).get("units"))
    return {
        "units": {key: _without(rules[key], _CAPS) for key in sorted(keys) if key in rules},
        "predicates": {key: code[key] for key in sorted(keys) if key in code},
    }


def _without(data: Mapping[str, object], names: Collection[str]) -> dict[str, object]:
    return {name: value for name, value in data.items() if name not in names}


def copied_facts(facts: Iterable[Fact], run_id: str, plan: ForkPlan, *, redone: Collection[str] = ()) -> list[Fact]:
    """Return the facts after the first one of the new run: all facts of the reused executions and their workers.

    `redone` are repeated tasks with an unchanged definition: the calls that made their agents are reused.
    """
    made = {instance_of(key) for key in (*plan.keys, *redone)}
    copies: list[Fact] = []
    for fact in facts:
        instance, data = task_instance(fact.instance), fact.data
        if isinstance(data, StimulusRecorded):
            if plan.stimuli is None:
                more = 0 if data.is_completion and instance in plan.instances else None
            else:
                more = plan.stimuli.get(fact.seq)
            if more is None:
                continue
            data = structs.replace(data, more=more)
        elif isinstance(data, ValueRedacted):
            pass  # the reused texts contain its placeholder
        elif instance == RUN or not (instance in plan.instances or (instance in made and is_making_agent(fact))):
            continue
        elif isinstance(data, ModelAnswered):
            data = structs.replace(data, is_copied=True)  # the original run paid for it (S-BUD-9)
        elif isinstance(data, MemoryRecalled | MemoryStored):
            data = structs.replace(data, embedding_tokens=0)
        elif isinstance(data, ReflectionRecorded | SamplingAnswered):
            data = structs.replace(data, input_tokens=0, output_tokens=0)
        copies.append(structs.replace(fact, run=run_id, epoch=0, seq=0, data=data))
    return copies


# Plans with units.


def plan_unit_fork(recorded: Plan, plan: Plan, facts: Sequence[Fact], run_id: str, name: str) -> ForkPlan:
    """Divide the executions of a run; `name` is a task, a unit, or one execution, such as `loop:refine#2`."""
    names = (fact.instance for fact in facts if not (fact.is_of_run or is_making_agent(fact)))
    executions = dict.fromkeys(task_instance(each) for each in names if "#" in each)
    _check_name(plan, executions, run_id, name)
    outputs = {fact.name for fact in facts if isinstance(fact.data, OutputRecorded)}
    cut = _Cut(recorded, plan, outputs, name)
    for group in RecordedStimuli(facts).numbered_groups:
        cut.apply(group)
    kept = cut.list_kept()
    left = [each for each in executions if each not in kept]
    used = {node_key(each) for each in kept}
    again = [*_shortest(left, kept)]
    # Tasks and units that never ran, and units that continue after their recorded executions.
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


def _paths(instance: str) -> Iterator[str]:
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
    taken = {path for each in others for path in _paths(each)}
    names = (next((path for path in _paths(each) if path not in taken), each) for each in executions)
    return dict.fromkeys(name if "/" in name or ":" in name else key_of(name) for name in names)


@dataclass(slots=True)
class _Cut:
    """Decides which stimuli of a run with units a fork reuses, group by group.

    The source of the recorded plan replays all stimuli, the source of the current plan the reused ones. Stimuli of the
    named execution are not reused, so the current source never starts the tasks that follow from them. A task's end is
    reused if both sources requested the task with the same context; an answer of user code, if both have the same open
    question about the same history. Failures, cancellations (except by a join) and early exits are not reused.
    """

    recorded: Plan
    plan: Plan
    outputs: Collection[str]
    name: str
    #: by position of a reused stimulus: number of stimuli that follow in its group
    stimuli: dict[int, int] = field(default_factory=dict[int, int])
    _then: FoldedSource = field(init=False)
    _now: FoldedSource = field(init=False)
    _kept: dict[str, None] = field(default_factory=dict[str, None])

    def __post_init__(self) -> None:
        self._then, self._now = FoldedSource(self.recorded), FoldedSource(self.plan)

    def apply(self, group: Sequence[tuple[int, Stimulus]]) -> None:
        used = [(seq, stimulus) for seq, stimulus in group if self._is_used(stimulus)]
        self._then.handle([stimulus for _, stimulus in group])
        if not used:
            return
        self._now.handle([stimulus for _, stimulus in used])
        ends = (stimulus for _, stimulus in used if isinstance(stimulus, Completed | Exited | Cancelled))
        self._kept.update(dict.fromkeys(end.instance for end in ends))
        for more, (seq, stimulus) in zip(range(len(used) - 1, -1, -1), used, strict=True):
            if not isinstance(stimulus, Begun):  # a fork has its own start
                self.stimuli[seq] = more

    def _is_used(self, stimulus: Stimulus) -> bool:
        match stimulus:
            case Begun():
                return True
            case Completed():
                return self._is_output_used(stimulus.instance)
            case Exited():
                return stimulus.has_output and self._is_output_used(stimulus.instance)
            case Cancelled():  # a join of a graph cancels unneeded branches
                return self._now.source.is_cancelling(stimulus.instance) and not is_named(self.name, stimulus.instance)
            case Evaluated():
                question = stimulus.question
                return (
                    stimulus.answer is not None
                    and question in self._now.questions
                    and question in self._then.questions
                    and not self._is_repeated(path_of_question(question))
                    and self._now.history_of(question) == self._then.history_of(question)
                )
            case _:
                return False

    def _is_output_used(self, instance: str) -> bool:
        if instance not in self.outputs or self._is_repeated(instance) or not self._now.source.is_running(instance):
            return False
        return _plain(self._now.starts.get(instance)) == _plain(self._then.starts.get(instance))

    def _is_repeated(self, path: str) -> bool:
        return path == self.name or is_named(self.name, path)

    def list_kept(self) -> dict[str, None]:
        unheard = [each for each in self._now.source.running if each in self.outputs and self._is_output_used(each)]
        return {**self._kept, **dict.fromkeys(unheard)}

    def open_paths(self, kept: Collection[str]) -> Iterator[str]:
        """Return the paths with which the fork begins: tasks, and executions with an open question for user code."""
        yield from (instance for instance in self._now.source.running if instance not in kept)
        yield from map(path_of_question, self._now.questions)


def _plain(start: Start | None) -> Start | None:
    """Return the part of a start that affects the output; the feedback's text follows from outputs and caps."""
    if start is None or not isinstance(start.changes, TaskChanges):
        return start
    return replace(start, changes=structs.replace(start.changes, feedback=""))
