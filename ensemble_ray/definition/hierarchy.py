"""What a hierarchical team declares beside its tasks: the manager's limits and its words. Package: definition.

In: what the user writes. Out: frozen values. Construction checks types alone; what the limits have to do with the team
is checked at the start of a hierarchical run (`check_constraints`, S-DOM-60), and never for another workflow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Protocol, TypeAlias, cast, runtime_checkable

from pydantic import AfterValidator, BeforeValidator, InstanceOf

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.fields import Accepts, StrictInt, StrictText, initially, to_tuple
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import ValidationError
from ensemble_ray.values.delegation import spoken_role
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.value import FrozenSequence, Value

__all__ = [
    "HierarchicalConstraints",
    "ManagerPromptContext",
    "ManagerPromptStrategy",
    "check_constraints",
    "check_roles",
]

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
