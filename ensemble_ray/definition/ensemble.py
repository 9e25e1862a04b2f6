"""What an ensemble declares: tasks, and the rules they run under. Package: definition.

Running it is added above (`ensemble.Ensemble`). Here only types are checked; what the parts have to do with each other
is checked at the start of every run (`validation`, S-DOM-60).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias, cast

from pydantic import BeforeValidator, Field, InstanceOf, PrivateAttr, SkipValidation, model_validator

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.fields import (
    Accepts,
    OneOrMany,
    OptionalDurationField,
    OptionalModelField,
    StrictInt,
    WorkflowField,
    initially,
    resolve_model,
    to_tuple,
)
from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.hierarchy import HierarchicalConstraints, ManagerPromptStrategy
from ensemble_ray.definition.levels import Levels
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.memory import Remembers
from ensemble_ray.definition.phase import Phase
from ensemble_ray.definition.reflection import Reflects
from ensemble_ray.definition.run_options import RunOptions
from ensemble_ray.definition.run_rules import RunRules, Watched
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.workflow import Workflow
from ensemble_ray.errors import ValidationError
from ensemble_ray.values.delegation import DelegationPolicy, PolicyFunction
from ensemble_ray.values.value import FrozenSequence, Value

__all__ = ["EnsembleDefinition", "Leadership", "RunOptions", "Work"]


def _policies_of(value: object) -> tuple[object, ...]:
    """Policies as a tuple; an entry that could never be asked is refused."""
    entries = to_tuple(value)
    for index, entry in enumerate(entries):
        if not callable(entry) and not callable(getattr(entry, "evaluate", None)):
            raise ValidationError(
                f"Ensemble delegation policy at index {index} ({type(entry).__name__}) is neither callable nor has a "
                "method 'evaluate'"
            )
    return entries


if TYPE_CHECKING:
    _Policy: TypeAlias = DelegationPolicy | PolicyFunction
    _Policies: TypeAlias = Accepts[tuple[_Policy, ...], _Policy | Sequence[_Policy] | None]
    _Agents: TypeAlias = Accepts[Sequence[Agent] | None, Agent | Sequence[Agent] | None]
else:
    _Agents = FrozenSequence[InstanceOf[Agent]] | None
    _Policies = Annotated[tuple[Any, ...], SkipValidation, BeforeValidator(_policies_of)]


class Work(Value):
    """What an ensemble does, and who does it.

    Attributes:
        tasks: What to do, in order.
        agents: Who takes part; None: the agents of the tasks, in the order of their first use.
        workflow: `"sequential"`, `"parallel"`, or None: parallel if a task has another one as context.
        loops: Tasks that are repeated; run beside or after the tasks, as the workflow says.
        phases: Named groups of tasks, in place of `tasks` and `loops`.
        graph: A state machine of tasks, in place of all others.
    """

    tasks: OneOrMany[InstanceOf[Task]] = Field(default=initially(()), kw_only=False)
    agents: _Agents = initially(None)
    workflow: WorkflowField = initially(Workflow.SEQUENTIAL)
    loops: OneOrMany[InstanceOf[Loop]] = initially(())
    phases: OneOrMany[InstanceOf[Phase]] = initially(())
    graph: InstanceOf[Graph] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_tasks(cls, data: Any) -> Any:
        """Refuse a loop, a phase or a graph among the tasks, and say where it belongs."""
        tasks = cast("Mapping[str, Any]", data).get("tasks") if isinstance(data, Mapping) else None
        for index, entry in enumerate(to_tuple(tasks)):
            for unit_type, argument in ((Loop, "loops=[...]"), (Phase, "phases=[...]"), (Graph, "graph=...")):
                if isinstance(entry, unit_type):
                    raise ValidationError(
                        f"tasks[{index}] is the {unit_type.__name__} '{entry.name}', not a task: give it as {argument}"
                    )
        return data

    @property
    def has_units(self) -> bool:
        """Whether there is anything but plain tasks."""
        return bool(self.loops or self.phases or self.graph)

    @property
    def all_tasks(self) -> Sequence[Task]:
        """Every task: the plain ones, then those of loops, phases and graph in declared order, as a plan has them."""
        if not self.has_units:
            return self.tasks
        bodies = (task for loop in self.loops for task in loop.body)
        inside = (task for phase in self.phases for task in phase.all_tasks)
        return (*self.tasks, *bodies, *inside, *(() if self.graph is None else self.graph.all_tasks))

    @property
    def all_loops(self) -> Sequence[Loop]:
        """Every loop: the ensemble's own, those of phases, and states that are loops."""
        inside = (loop for phase in self.phases for loop in phase.loops)
        return (*self.loops, *inside, *(() if self.graph is None else self.graph.loops))


class Leadership(Value):
    """Who decides what is done, and what those are held to who hand work on.

    Attributes:
        manager_llm: Model of a hierarchical run's manager; None: the first agent's, else `llm`.
        manager_max_iterations: Delegations that the manager may ask for; > 0.
        manager_prompt_strategy: Writes the manager's prompts; None: `DefaultManagerPromptStrategy`.
        hierarchical_constraints: What the manager is held to, whatever its model says.
        enforce_required: What happens when the manager wants to finish and a required worker is missing: `"remind"`: it
            is told once and gets another turn; `"fail"`: the run fails at once.
        manager_stall_turns: Turns of the manager without progress that end the run; 0: none do.
        max_delegation_depth: How deep delegations of agents with `allow_delegation` may be nested; > 0.
        delegation_policies: Asked in order about each delegation; functions of a `DelegationRequest` and a
            `DelegationPolicyContext`, sync or async, or objects with `evaluate`.
        delegation_timeout: How long one delegation may take, a `timedelta` or seconds; then the worker is stopped and
            the delegating model is told. None: as long as it likes.
        delegation_retries: How often a delegation whose worker's process died is sent to another process; 0 to 9.
    """

    manager_llm: OptionalModelField = initially(None)
    manager_max_iterations: StrictInt = 20
    manager_prompt_strategy: ManagerPromptStrategy | None = None
    hierarchical_constraints: HierarchicalConstraints | None = None
    enforce_required: Literal["remind", "fail"] = "remind"
    manager_stall_turns: StrictInt = 5
    max_delegation_depth: StrictInt = 3
    delegation_policies: _Policies = initially(())
    delegation_timeout: OptionalDurationField = initially(None)
    delegation_retries: StrictInt = 2

    @model_validator(mode="before")
    @classmethod
    def _check_leadership(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        arguments = cast("Mapping[str, Any]", data)
        return {**arguments, "manager_llm": resolve_model(arguments.get("manager_llm"))}


class EnsembleDefinition(Watched, Reflects, Remembers, Leadership, RunRules, Work):
    """Tasks and the rules they run under; its fields are those of its bases, the last one's first."""

    _levels: Levels | None = PrivateAttr(default=None)

    @property
    def levels(self) -> Levels | None:
        """Where its tasks stand in the tree of a map-reduce; None: they are no such tree."""
        return self._levels

    def with_levels(self, levels: Levels) -> Self:
        """Return this ensemble, its tasks being the tree of a map-reduce; one with other tasks is none again."""
        placed = self.model_copy()
        placed._levels = levels  # noqa: SLF001  a copy of its own
        return placed

    def with_tasks(self, tasks: Task | Sequence[Task]) -> Self:
        """Return this ensemble with another task list.

        Raises:
            ValueError: there is none, or one of them is None.
        """
        entries = to_tuple(tasks)
        if not entries:
            raise ValidationError("tasks must not be None or empty")
        for index, task in enumerate(entries):
            if task is None:
                raise ValidationError(f"tasks[{index}] must not be None")
        return self.replace(tasks=entries)
