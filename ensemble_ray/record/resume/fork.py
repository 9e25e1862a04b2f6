"""What a fork of a run uses of its record, and what it does again. Pure (S-DUR-54).

Rules:
1. The task it begins from is done again; in a sequential run all later tasks too, in a parallel one all that depend on it.
2. What gave no output is done, and everything after it likewise.
3. Everything else is used as it is recorded: outputs, and the effects that led to them.
4. What is used must be defined as it was; what is done again may be defined otherwise.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from ensemble_ray.errors import ValidationError
from ensemble_ray.facts.effects import DelegationDecided, ModelAnswered, is_making_agent
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.lenient import as_mapping, as_sequence, as_text
from ensemble_ray.facts.memory import MemoryRecalled, MemoryStored
from ensemble_ray.facts.reflection import ReflectionRecorded
from ensemble_ray.facts.runs import PlanRecorded, StimulusRecorded
from ensemble_ray.facts.sampling import SamplingAnswered
from ensemble_ray.plan.unit_plans import SYNTHESIZED
from ensemble_ray.record.identity.digest import differences
from ensemble_ray.values.ids import RUN, instance_of, task_instance

if TYPE_CHECKING:
    from ensemble_ray.plan.plan import Plan

#: Parts of a node that say who does it; unknown of agents that are not made yet.
_BY_WHOM = ("agent_role", "agent_key")
#: The plan's rules that decide what the recorded order of tasks means.
_RULES = ("workflow",)
#: Fields of units that say how often something may be done, and what becomes of a unit then: they undo nothing.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkPlan:
    """What a fork uses, and what it does again."""

    #: as people are told: tasks, in the order of the plan; of a run with units executions, in the order of the record
    reused: tuple[str, ...]
    again: tuple[str, ...]
    #: keys of the tasks of which something is used, in the order of the plan
    keys: tuple[str, ...]
    #: executions of tasks that are used
    instances: frozenset[str]
    #: of a run with units: numbers of the stimuli that are used, each with how many of its group follow; None: the ends of
    #: the tasks that are used, each alone
    stimuli: Mapping[int, int] | None = None
    #: keys of the units in which something is used
    units: frozenset[str] = frozenset()


def plan_fork(plan: Plan, recorded: Collection[str], from_task: str) -> ForkPlan:
    """Part the tasks of a plan.

    Args:
        plan: What would run today.
        recorded: Keys of tasks whose output is recorded.
        from_task: Key of the first task that is done again.

    Raises:
        ValidationError: the plan has no such task.
    """
    keys = [node.key for node in plan.nodes]
    if from_task not in keys:
        near = difflib.get_close_matches(from_task, keys, n=3, cutoff=0.5)
        shown = ", ".join(near or keys[:10])
        msg = f"Unknown task '{from_task}'. {'Nearest' if near else 'Tasks'}: [{shown}]"
        raise ValidationError(msg)
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
    """How what is reused is defined otherwise than it was, one line per path; empty when it is not.

    Args:
        recorded: The run's first fact.
        current: The first fact that the definition at hand would record.
        reused: Keys of the tasks whose outputs are used.
        asked: Keys of the agents that those tasks handed work to (`asked_agents`).
        units: Keys of the loops, phases and graphs in which something is used; how often they may repeat it is theirs.
    """
    unmade = {key for key, node in _entries(current, "nodes").items() if node.get("agent_role") == SYNTHESIZED}
    before, now = ({**_parts(header, reused, unmade, asked), **_units(header, units)} for header in (recorded, current))
    return differences(before, now)


def asked_agents(facts: Iterable[Fact], instances: Collection[str]) -> set[str]:
    """Keys of the agents that these executions of tasks handed work to, and those these asked."""
    return {
        fact.data.worker
        for fact in facts
        if isinstance(fact.data, DelegationDecided)
        and task_instance(fact.name) in instances
        and fact.data.worker is not None
    }


def _entries(header: PlanRecorded, part: Literal["nodes", "agents", "units"]) -> dict[str, Mapping[str, object]]:
    """Return a part of a plan by key, as it is recorded: records are compared as data."""
    entries = map(as_mapping, as_sequence((header.plan or {}).get(part)))
    return {as_text(entry.get("key")): entry for entry in entries}


def _parts(
    header: PlanRecorded, keys: Sequence[str], unmade: Collection[str], asked: Collection[str]
) -> dict[str, object]:
    """Return what of a first fact concerns those tasks, by key: places, what does them, the agents that do them or were asked.

    Of tasks whose agents are not made yet it is not known who does them.
    """
    definition, nodes, places = header.definition or {}, _entries(header, "nodes"), _entries(header, "agents")
    tasks, agents = as_mapping(definition.get("tasks")), as_mapping(definition.get("agents"))
    doing = {as_text(nodes[key].get("agent_key")) for key in keys if key in nodes and key not in unmade} - {""}
    doing |= set(asked)
    rules = {"delegation": definition.get("delegation")} if asked else {}
    return {
        "tasks": {key: _node_data(nodes[key], is_unmade=key in unmade) for key in keys if key in nodes},
        "definition": {key: tasks[key] for key in keys if key in tasks},
        "agents": {key: {**as_mapping(places.get(key)), **as_mapping(agents.get(key))} for key in sorted(doing)},
        "plan": {rule: (header.plan or {}).get(rule) for rule in _RULES},
        **rules,
    }


def _units(header: PlanRecorded, keys: Collection[str]) -> dict[str, object]:
    """Return what of a first fact concerns those units, by key: their members and rules, and the code that they ask."""
    if not keys:
        return {}
    rules = _entries(header, "units")
    code = as_mapping((header.definition or {}).get("units"))
    return {
        "units": {
            key: {name: value for name, value in rules[key].items() if name not in _CAPS}
            for key in sorted(keys)
            if key in rules
        },
        "predicates": {key: code[key] for key in sorted(keys) if key in code},
    }


def _node_data(node: Mapping[str, object], *, is_unmade: bool) -> dict[str, object]:
    """Return a task's place; its number in the list says nothing about what it gave."""
    left_out = ("index", *_BY_WHOM) if is_unmade else ("index",)
    return {name: value for name, value in node.items() if name not in left_out}


def copied_facts(facts: Iterable[Fact], run_id: str, plan: ForkPlan, *, redone: Collection[str] = ()) -> list[Fact]:
    """Return what the new run's record begins with, behind its first fact: everything that is recorded of what is used.

    Work that was handed on belongs to who asked for it.

    Args:
        facts: Facts of the run that is forked.
        run_id: Id of the new run.
        plan: What is used.
        redone: Keys of tasks that are done again as they were defined: the calls that made their agents are used.
    """
    made = {instance_of(key) for key in (*plan.keys, *redone)}
    copies: list[Fact] = []
    for fact in facts:
        instance, data = task_instance(fact.instance), fact.data
        if isinstance(data, StimulusRecorded):
            more = _more_of(fact, plan)
            if more is None:
                continue
            data = replace(data, more=more)
        elif instance == RUN or not (instance in plan.instances or (instance in made and is_making_agent(fact))):
            continue
        elif isinstance(data, ModelAnswered):
            data = replace(data, is_copied=True)  # the run that is forked paid for it (S-BUD-9)
        elif isinstance(data, MemoryRecalled | MemoryStored):
            data = replace(data, embedding_tokens=0)  # as above; the outputs have them in their metrics
        elif isinstance(data, ReflectionRecorded | SamplingAnswered):
            data = replace(data, input_tokens=0, output_tokens=0)
        copies.append(replace(fact, run=run_id, epoch=0, seq=0, data=data))
    return copies


def _more_of(fact: Fact, plan: ForkPlan) -> int | None:
    """Return how many of a stimulus' group follow in the new run; None: it is not used."""
    if plan.stimuli is not None:
        return plan.stimuli.get(fact.seq)
    is_used = isinstance(fact.data, StimulusRecorded) and fact.data.is_completion
    return 0 if is_used and task_instance(fact.instance) in plan.instances else None  # groups are torn apart here
