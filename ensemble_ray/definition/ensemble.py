"""The definition of an ensemble: tasks, and the rules that they run under.

The start of every run checks the parts against each other (`validation`, S-DOM-60).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self, TypeAlias, cast, runtime_checkable

from pydantic import BeforeValidator, Field, InstanceOf, PrivateAttr, SkipValidation

from ensemble_ray.definition import fields
from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.phase import Phase
from ensemble_ray.definition.run_rules import RunListeners, RunRules
from ensemble_ray.definition.task import Task, WithMemory, WithReflection
from ensemble_ray.errors import ValidationError
from ensemble_ray.values.delegation import DelegationPolicy, PolicyFunction, spoken_role
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.value import Accepts, FrozenSequence, OneOrMany, Value, to_tuple

_RESERVED_ROLE = "manager"


def _distinct_roles(value: object) -> object:
    """Keep the order of the first mentions. A set is sorted (S-SET-24)."""
    if isinstance(value, set | frozenset):
        return tuple(sorted(cast("Collection[str]", value), key=str))
    entries = to_tuple(value)
    return tuple(entry for index, entry in enumerate(entries) if entry not in entries[:index])


if TYPE_CHECKING:
    _Roles: TypeAlias = Accepts[tuple[str, ...], str | Collection[str] | None]
    _Caps: TypeAlias = Accepts[Mapping[str, int], Mapping[str, int] | None]
    _Stages: TypeAlias = Accepts[tuple[tuple[str, ...], ...], str | Sequence[str | Collection[str]] | None]
else:
    _Roles = Annotated[tuple[fields.StrictText, ...], BeforeValidator(_distinct_roles)]
    _Caps = fields.CopiedMapping[fields.StrictText, fields.StrictInt]
    _Stages = Annotated[tuple[_Roles, ...], BeforeValidator(to_tuple)]


class HierarchicalConstraints(Value):
    """Limits of a hierarchical run's manager that do not depend on its model. Other workflows ignore them.

    Roles are matched exactly.

    Attributes:
        required_workers: Roles that must succeed at least once; a set is sorted.
        allowed_workers: Roles that may be delegated to; empty: all.
        max_calls_per_worker: Most delegations to a role; > 0 each.
        global_max_delegations: Most delegations in total; 0: no limit.
        required_stages: Groups of roles in order: every role of a group succeeds before a role of a later group starts.

    Examples:
        >>> rules = HierarchicalConstraints(required_stages=[["Researcher"], ["Writer"]], required_workers={"Writer"})
        >>> rules.required_stages
        (('Researcher',), ('Writer',))
    """

    required_workers: _Roles = fields.initially(())
    allowed_workers: _Roles = fields.initially(())
    max_calls_per_worker: _Caps = fields.initially({})
    global_max_delegations: fields.StrictInt = 0
    required_stages: _Stages = fields.initially(())


class ManagerPromptContext(Value):
    """Input of a manager prompt strategy.

    Attributes:
        agents: The workers, in order, with the agents that were made for tasks.
        tasks: All tasks, with resolved texts.
        previous_outputs: Outputs from before this run; usually empty.
        workflow_description: Purpose of the run, or None.
    """

    agents: FrozenSequence[InstanceOf[Agent]] = ()
    tasks: FrozenSequence[InstanceOf[Task]] = ()
    previous_outputs: FrozenSequence[InstanceOf[TaskOutput]] = ()
    workflow_description: str | None = None


@runtime_checkable
class ManagerPromptStrategy(Protocol):
    """Writes the manager's prompts. Any object with these two methods, both plain functions, is accepted."""

    def build_system_prompt(self, context: ManagerPromptContext, /) -> str | None:
        """Return the manager's background: its function and its workers. None means ""."""
        ...

    def build_user_prompt(self, context: ManagerPromptContext, /) -> str | None:
        """Return the manager's task. A fixed sentence replaces a blank text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Map-reduce levels of tasks, which are listed in the order of levels."""

    workflow: str  # in the trace
    places: Mapping[str, tuple[str, int]]  # node type and level, by object id
    texts: Mapping[str, Sequence[str]]  # texts of items with names in braces, by object id


def _to_policies(value: object) -> tuple[object, ...]:
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
    _Policies = Annotated[tuple[Any, ...], SkipValidation, BeforeValidator(_to_policies)]


class Work(Value):
    """The tasks of an ensemble and its agents.

    Attributes:
        tasks: In order.
        agents: The agents that take part; None: the agents of the tasks.
        workflow: `"sequential"`, `"parallel"`, or None: parallel if a task has another one as context.
        loops: Repeated tasks, beside or after the tasks, as the workflow says.
        phases: Named groups of tasks, in place of `tasks` and `loops`.
        graph: A state machine of tasks, in place of all others.
    """

    tasks: OneOrMany[InstanceOf[Task]] = Field(default=fields.initially(()), kw_only=False)
    agents: _Agents = fields.initially(None)
    workflow: fields.WorkflowField = fields.initially(fields.Workflow.SEQUENTIAL)
    loops: OneOrMany[InstanceOf[Loop]] = fields.initially(())
    phases: OneOrMany[InstanceOf[Phase]] = fields.initially(())
    graph: InstanceOf[Graph] | None = None

    @fields.checks_arguments
    @classmethod
    def _check_tasks(cls, arguments: dict[str, Any]) -> None:
        """Name the right argument for a loop, a phase or a graph among the tasks."""
        for index, entry in enumerate(to_tuple(arguments.get("tasks"))):
            for unit_type, argument in ((Loop, "loops=[...]"), (Phase, "phases=[...]"), (Graph, "graph=...")):
                if isinstance(entry, unit_type):
                    raise ValidationError(
                        f"tasks[{index}] is the {unit_type.__name__} '{entry.name}', not a task: give it as {argument}"
                    )

    @property
    def has_units(self) -> bool:
        """Whether it has loops, phases or a graph."""
        return bool(self.loops or self.phases or self.graph)

    @property
    def all_tasks(self) -> Sequence[Task]:
        """All tasks in the order of a plan: plain tasks, then those of loops, phases and graph."""
        if not self.has_units:
            return self.tasks
        bodies = (task for loop in self.loops for task in loop.body)
        inside = (task for phase in self.phases for task in phase.all_tasks)
        return (*self.tasks, *bodies, *inside, *(() if self.graph is None else self.graph.all_tasks))

    @property
    def all_loops(self) -> Sequence[Loop]:
        """Every loop: of the ensemble, of its phases, and states of its graph."""
        inside = (loop for phase in self.phases for loop in phase.loops)
        return (*self.loops, *inside, *(() if self.graph is None else self.graph.loops))


class Leadership(Value):
    """The manager, and the rules for delegated work.

    Attributes:
        manager_llm: Model of a hierarchical run's manager; None: the first agent's, else `llm`.
        manager_max_iterations: Most delegations that the manager may request; > 0.
        manager_prompt_strategy: Writes the manager's prompts; None: `DefaultManagerPromptStrategy`.
        hierarchical_constraints: Limits of the manager that do not depend on its model.
        enforce_required: If the manager finishes too early for a required worker: `"remind"`: one reminder and another turn;
            `"fail"`: the run fails.
        manager_stall_turns: Turns of the manager without progress that end the run; 0: no limit.
        max_delegation_depth: Deepest nesting of delegations by agents with `allow_delegation`; > 0.
        delegation_policies: Called in order for each delegation: functions of a `DelegationRequest` and a
            `DelegationPolicyContext`, sync or async, or objects with `evaluate`.
        delegation_timeout: Limit of one delegation, a `timedelta` or seconds; None: no limit.
        delegation_retries: How often a delegation is sent again after its process died; 0 to 9.
    """

    manager_llm: fields.OptionalModelField = fields.initially(None)
    manager_max_iterations: fields.StrictInt = 20
    manager_prompt_strategy: ManagerPromptStrategy | None = None
    hierarchical_constraints: HierarchicalConstraints | None = None
    enforce_required: Literal["remind", "fail"] = "remind"
    manager_stall_turns: fields.StrictInt = 5
    max_delegation_depth: fields.StrictInt = 3
    delegation_policies: _Policies = fields.initially(())
    delegation_timeout: fields.OptionalDurationField = fields.initially(None)
    delegation_retries: fields.StrictInt = 2

    @fields.checks_arguments
    @classmethod
    def _resolve_manager_model(cls, arguments: dict[str, Any]) -> None:
        arguments["manager_llm"] = fields.resolve_model(arguments.get("manager_llm"))


class EnsembleDefinition(RunListeners, WithReflection, WithMemory, Leadership, RunRules, Work):
    """Tasks and the rules that they run under. It has the fields of all bases, the last base first."""

    _levels: Levels | None = PrivateAttr(default=None)

    @property
    def levels(self) -> Levels | None:
        """Map-reduce levels of its tasks; None: it is not the plan of a map-reduce."""
        return self._levels

    def with_levels(self, levels: Levels) -> Self:
        """Return this ensemble with its tasks as the tree of a map-reduce. A copy with other tasks loses the levels."""
        placed = self.model_copy()
        placed._levels = levels  # noqa: SLF001  a copy of this class
        return placed

    def with_tasks(self, tasks: Task | Sequence[Task]) -> Self:
        """Return this ensemble with another list of tasks; an empty list and None are refused."""
        entries = to_tuple(tasks)
        if not entries:
            raise ValidationError("tasks must not be None or empty")
        for index, task in enumerate(entries):
            if task is None:
                raise ValidationError(f"tasks[{index}] must not be None")
        return self.replace(tasks=entries)


def check_roles(roles: Sequence[str]) -> None:
    """Refuse roles that a delegation could not distinguish, and the manager's role (S-HIER-4)."""
    for role in roles:
        if spoken_role(role) == _RESERVED_ROLE:
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
    """Check constraints in the order of S-HIER-30 to S-HIER-38.

    None: not all roles are known, so unknown ones are accepted.
    """
    if constraints is None:
        return
    allowed = constraints.allowed_workers
    _check_known("allowed_workers", allowed, roles)
    _check_known("required_workers", constraints.required_workers, roles)
    for role in constraints.required_workers:
        if allowed and role not in allowed:
            raise _broken(f"required_workers contains '{role}' which is not in allowed_workers")
    _check_known("max_calls_per_worker", constraints.max_calls_per_worker, roles)
    for role, cap in constraints.max_calls_per_worker.items():
        if cap <= 0:
            raise _broken(f"max_calls_per_worker value for '{role}' must be > 0, got: {cap}")
    if constraints.global_max_delegations < 0:
        raise _broken(f"global_max_delegations must be >= 0, got: {constraints.global_max_delegations}")
    staged = [role for stage in constraints.required_stages for role in stage]
    _check_known("required_stages", staged, roles)
    # A stage contains a role once (S-HIER-38).
    seen: set[str] = set()
    for role in staged:
        if role in seen:
            raise _broken(f"required_stages contains duplicate agent role '{role}' in multiple stages")
        seen.add(role)


def _check_known(field: str, named: Collection[str], roles: Sequence[str] | None) -> None:
    for role in named:
        if roles is not None and role not in roles:
            raise _broken(f"{field} references unknown agent: '{role}'")


def _broken(text: str) -> ValidationError:
    return ValidationError(f"HierarchicalConstraints.{text}")
