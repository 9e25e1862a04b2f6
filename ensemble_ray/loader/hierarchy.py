"""What a team file says of a manager and of delegation: the constraints, and who writes and decides. Room: loader.

The keys of the constraints are those of `HierarchicalConstraints`; a test holds the table to its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ensemble_ray.definition.hierarchy import HierarchicalConstraints, ManagerPromptStrategy
from ensemble_ray.errors import ValidationError
from ensemble_ray.loader.document import Entries, Located
from ensemble_ray.loader.kinds import (
    BAD,
    TEXT,
    WHOLE,
    Field,
    Kind,
    Reading,
    given,
    has_method,
    list_of,
    read_fields,
    reference,
)

__all__ = ["CONSTRAINT", "CONSTRAINTS", "POLICIES", "STRATEGY"]


def _read_constraints(reading: Reading, node: Located, where: str) -> object:
    values = read_fields(reading, node, CONSTRAINT, where, what="the constraints")
    if values is None:
        return BAD
    try:
        return HierarchicalConstraints(**cast("dict[str, Any]", values))
    except ValidationError as error:
        return reading.refuse(node, where, str(error))


def _read_caps(reading: Reading, node: Located, where: str) -> object:
    if not isinstance(node, Entries):
        return reading.refuse(node, where, "must be a mapping of roles to whole numbers")
    caps = {role: WHOLE.read(reading, entry.value, f"{where}.{role}") for role, entry in node.entries.items()}
    return caps if all(given(cap) for cap in caps.values()) else BAD


def _is_policy(found: object) -> bool:
    return callable(found) or callable(getattr(found, "evaluate", None))


def _is_strategy(found: object) -> bool:
    return isinstance(found, ManagerPromptStrategy)


def _is_made_as_strategy(found: object) -> bool:
    return has_method("build_system_prompt")(found) and has_method("build_user_prompt")(found)


_ROLES = list_of(TEXT)

#: Keys of the constraints.
CONSTRAINT: Mapping[str, Field] = {
    "required_workers": Field(kind=_ROLES),
    "allowed_workers": Field(kind=_ROLES),
    "max_calls_per_worker": Field(
        kind=Kind(read=_read_caps, schema={"type": "object", "additionalProperties": {"type": "integer"}})
    ),
    "global_max_delegations": Field(kind=WHOLE),
    "required_stages": Field(kind=list_of(_ROLES)),
}
#: What the manager is held to.
CONSTRAINTS = Kind(read=_read_constraints, schema={"$ref": "#/definitions/hierarchical_constraints"})
#: Who is asked about each delegation.
POLICIES = list_of(
    reference(
        "a callable or an object with 'evaluate'",
        makes=True,
        accepts=_is_policy,
        is_made_for_it=has_method("evaluate"),
    )
)
#: Who writes the manager's prompts.
STRATEGY = reference(
    "an object with 'build_system_prompt' and 'build_user_prompt'",
    makes=True,
    accepts=_is_strategy,
    is_made_for_it=_is_made_as_strategy,
)
