"""What drives the runs of one endpoint is made of; plain data, so that it can be made again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from ensemble_ray.access.admission import KeyPolicy
from ensemble_ray.serve.driving.limits import EndpointLimits
from ensemble_ray.serve.team import TeamName


def part_of_name(endpoint: str) -> str:
    """Return an endpoint's name as a part of a longer one, whose parts `/` stands between; most names stay as they are.

    Examples:
        >>> part_of_name("shop"), part_of_name("shop/eu")
        ('shop', 'shop%2Feu')
    """
    return endpoint.replace("%", "%25").replace("/", "%2F")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverConfig:
    """One deployment of an endpoint."""

    #: of the application; names the actor and the ledger
    name: str
    teams: tuple[TeamName, ...]
    limits: EndpointLimits
    #: when it was deployed, Unix time, s; the newer deployment takes the place of the older one
    deployed_at: float
    #: `module:attribute` names of the tools that clients may call
    tools: tuple[str, ...] = ()
    #: models that runs can be told to ask, by name: `module:attribute`, or as a team file says a model
    models: Mapping[str, JsonValue] = field(default_factory=dict[str, "JsonValue"])
    #: of the schedulers that have its runs; empty: the one without a name
    namespace: str = ""
    #: `module:attribute` names of the Datasets that requests may map, by the names that requests know
    datasets: Mapping[str, str] = field(default_factory=dict[str, str])
    #: which requests need a key
    keys: KeyPolicy = KeyPolicy.AUTO
