"""What an ensemble declares: tasks, and the rules they run under.

Running it is added above (`ensemble.Ensemble`). Here only types are checked; what the parts have to do with each other
is checked at the start of every run (`validation`, S-DOM-60).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self, TypeAlias, cast, runtime_checkable

from pydantic import AfterValidator, BeforeValidator, Field, InstanceOf, PrivateAttr, SkipValidation, model_validator

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.fields import (
    OptionalDurationField,
    OptionalModelField,
    StrictInt,
    StrictText,
    Workflow,
    WorkflowField,
    initially,
    resolve_model,
)
from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.phase import Phase
from ensemble_ray.definition.run_rules import RunRules, Watched
from ensemble_ray.definition.task import Reflects, Remembers, Task
from ensemble_ray.errors import ValidationError
from ensemble_ray.values.delegation import DelegationPolicy, PolicyFunction, spoken_role
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.value import Accepts, FrozenSequence, OneOrMany, Value, to_tuple

_PREFIX = "HierarchicalConstraints."
#: The manager's role as a model may spell it; no worker may have it (S-HIER-4).
_RESERVED = "manager"


def _roles_of(value: object) -> object:
    """Roles in the order given, each once; a set has no order, so it is sorted (S-SET-24)."""
    if isinstance(value, set | frozenset):
        return tuple(sorted(cast("Collection[str]", value), key=str))
    entries = to_tuple(value)
    return tuple(entry for index, entry in enumerate(entries) if entry not in entries[:index])


def _caps_of(value: object) -> object:
    return {} if value is None else value


def _copy(value: Mapping[str, int]) -> Mapping[str, int]:
    return dict(value)


if TYPE_CHECKING:
    _Roles: TypeAlias = Accepts[tuple[str, ...], str | Collection[str] | None]
    _Caps: TypeAlias = Accepts[Mapping[str, int], Mapping[str, int] | None]
    _Stages: TypeAlias = Accepts[tuple[tuple[str, ...], ...], str | Sequence[str | Collection[str]] | None]
else:
    _Roles = Annotated[tuple[StrictText, ...], BeforeValidator(_roles_of)]
    _Caps = Annotated[Mapping[StrictText, StrictInt], BeforeValidator(_caps_of), AfterValidator(_copy)]
    _Stages = Annotated[tuple[_Roles, ...], BeforeValidator(to_tuple)]


class HierarchicalConstraints(Value):
    """What the manager of a hierarchical run is held to, whatever its model says.

    Roles are those of the workers, letter by letter. Other workflows ignore all of it.

    Attributes:
        required_workers: Roles that must succeed at least once; a set is sorted.
        allowed_workers: Roles that may be delegated to; empty: all.
        max_calls_per_worker: Delegations to a role, at most; > 0 each.
        global_max_delegations: Delegations in all, at most; 0: no cap.
        required_stages: Groups of roles in order: every role of a group succeeds before one of a later group starts.

    Examples:
        >>> rules = HierarchicalConstraints(required_stages=[["Researcher"], ["Writer"]], required_workers={"Writer"})
        >>> rules.required_stages
        (('Researcher',), ('Writer',))
    """

    required_workers: _Roles = initially(())
    allowed_workers: _Roles = initially(())
    max_calls_per_worker: _Caps = initially({})
    global_max_delegations: StrictInt = 0
    required_stages: _Stages = initially(())


class ManagerPromptContext(Value):
    """What a prompt strategy may use.

    Attributes:
        agents: The workers, in order; agents that were made for tasks are among them.
        tasks: The whole task list, texts resolved.
        previous_outputs: What was done before this run and belongs to it; usually nothing.
        workflow_description: What the whole is for, if anybody said.
    """

    agents: FrozenSequence[InstanceOf[Agent]] = ()
    tasks: FrozenSequence[InstanceOf[Task]] = ()
    previous_outputs: FrozenSequence[InstanceOf[TaskOutput]] = ()
    workflow_description: str | None = None


@runtime_checkable
class ManagerPromptStrategy(Protocol):
    """Writes what the manager is told; any object of this shape will do. Both methods are plain functions."""

    def build_system_prompt(self, context: ManagerPromptContext, /) -> str | None:
        """Who the manager is and whom it has: its background. None is ""."""
        ...

    def build_user_prompt(self, context: ManagerPromptContext, /) -> str | None:
        """Return what it has to do: its task. Blank: a fixed sentence takes its place."""
        ...


def check_roles(roles: Sequence[str]) -> None:
    """Refuse workers that a delegation could not tell apart, or not from the manager (S-HIER-4).

    Args:
        roles: One per worker, in order; an agent that does several tasks counts once.

    Raises:
        ValidationError: the reserved role before any duplicate.
    """
    for role in roles:
        if spoken_role(role) == _RESERVED:
            raise ValidationError(
                "Agent role 'Manager' is reserved for the virtual manager in HIERARCHICAL workflow. "
                f"Choose a different role for agent '{role}'."
            )
    seen: set[str] = set()
    for role in roles:
        if spoken_role(role) in seen:
            raise ValidationError(
                f"Duplicate agent role '{role}' detected in HIERARCHICAL workflow. "
                "All agent roles must be unique (case-insensitive) to avoid ambiguous delegation."
            )
        seen.add(spoken_role(role))


def check_constraints(constraints: HierarchicalConstraints | None, roles: Sequence[str] | None) -> None:
    """Return the rules of constraints, in order (S-HIER-30 to S-HIER-37).

    Args:
        constraints: None: nothing to check.
        roles: Those of all workers; None: not all are known yet, so that whether a role exists is not asked.

    Raises:
        ValidationError: the first rule that is broken.
    """
    if constraints is None:
        return
    allowed = constraints.allowed_workers
    _refuse_unknown("allowed_workers", allowed, roles)
    _refuse_unknown("required_workers", constraints.required_workers, roles)
    for role in constraints.required_workers:
        if allowed and role not in allowed:
            raise _broken(f"required_workers contains '{role}' which is not in allowed_workers")
    _refuse_unknown("max_calls_per_worker", constraints.max_calls_per_worker, roles)
    for role, cap in constraints.max_calls_per_worker.items():
        if cap <= 0:
            raise _broken(f"max_calls_per_worker value for '{role}' must be > 0, got: {cap}")
    if constraints.global_max_delegations < 0:
        raise _broken(f"global_max_delegations must be >= 0, got: {constraints.global_max_delegations}")
    staged = [role for stage in constraints.required_stages for role in stage]
    _refuse_unknown("required_stages", staged, roles)
    # A role is kept once per stage, so that a second one is in another stage (S-HIER-38).
    seen: set[str] = set()
    for role in staged:
        if role in seen:
            raise _broken(f"required_stages contains duplicate agent role '{role}' in multiple stages")
        seen.add(role)


def _refuse_unknown(field: str, named: Collection[str], roles: Sequence[str] | None) -> None:
    """S-HIER-30, S-HIER-31, S-HIER-33 and S-HIER-36; roles match letter by letter (S-HIER-38)."""
    if roles is None:
        return
    known = frozenset(roles)
    for role in named:
        if role not in known:
            raise _broken(f"{field} references unknown agent: '{role}'")


def _broken(text: str) -> ValidationError:
    return ValidationError(_PREFIX + text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Where each task stands in the tree; the task list is in the order of levels."""

    #: what a trace calls a run of it
    workflow: str
    #: node type and level, by object id of the task
    places: Mapping[str, tuple[str, int]]
    #: texts of its items that have names in braces, by object id of the task; tasks without such items are left out
    texts: Mapping[str, Sequence[str]]


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
