"""Sections of a team file that become objects at once: limits, costs, constraints. Package: loader.

In: a part of the tree. Out: the object. `KINDS` knows them from here on, so that a class's fields of these types get their keys.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from ensemble_ray.definition.hierarchy import HierarchicalConstraints
from ensemble_ray.definition.retry_policy import RetryPolicy
from ensemble_ray.loader.field_types import Number, Text, Whole, mapping
from ensemble_ray.loader.models import Model
from ensemble_ray.loader.reviews import ReviewName
from ensemble_ray.loader.section import KINDS, FileSection, key, keys_of
from ensemble_ray.loader.tools import Tool
from ensemble_ray.ports import ChatModel
from ensemble_ray.values.metrics import CostConfiguration
from ensemble_ray.values.rate_limit import RateLimit
from ensemble_ray.values.reviews import Review

#: `keys_of` from here, so that whoever gives a section its keys has the kinds of this module.
__all__ = ["ConstraintKeys", "Retry", "keys_of"]


@keys_of(RateLimit)
class RateLimitKeys(FileSection):
    """So many requests in each period."""

    called = "a rate limit"
    requests: Whole = key(is_required=True)
    period: Number = key(is_required=True)


@keys_of(CostConfiguration)
class CostKeys(FileSection):
    """Money per token."""

    called = "a cost configuration"
    currency: Text = key("Shown behind amounts; USD unless told.")


@keys_of(RetryPolicy)
class RetryKeys(FileSection):
    """How patient a run is with model calls that fail by the provider's fault."""

    called = "a retry policy"


@keys_of(HierarchicalConstraints)
class ConstraintKeys(FileSection):
    """What the manager is held to, whatever its model says."""

    called = "the constraints"
    max_calls_per_worker: Annotated[dict[str, Whole], mapping("must be a mapping of roles to whole numbers")] = key()


Retry = Annotated[RetryKeys, AfterValidator(RetryKeys.build)]
_TOOLS = "Tools it may call: a built-in one by name, or module:attribute; parameters as `name: {...}`."
KINDS.update(
    {
        ChatModel: Model,
        tuple: Annotated[list[Tool], Field(description=_TOOLS)],
        RateLimit: Annotated[RateLimitKeys, AfterValidator(RateLimitKeys.build)],
        CostConfiguration: Annotated[CostKeys, AfterValidator(CostKeys.build)],
        Review: ReviewName,
        HierarchicalConstraints: Annotated[ConstraintKeys, AfterValidator(ConstraintKeys.build)],
    }
)
