"""The services of a process that user-level objects reach without being handed them.

Context variables do not cross processes; the actor or the inline runtime sets them when work arrives.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble_ray.process.context import ScopedVariable

if TYPE_CHECKING:
    from ensemble_ray.ports import CpuPool, DriverServices, Limiter

__all__ = ["Services", "services", "use_services"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Shared things of a process that user-level objects reach without being handed them."""

    limiter: Limiter
    cpu: CpuPool
    #: None where this process is the driver itself
    driver: DriverServices | None = None


_services: ContextVar[Services] = ContextVar("ensemble_ray_services")


def services() -> Services | None:
    """Return the services set for this piece of work; None outside any run."""
    return _services.get(None)


def use_services(chosen: Services) -> AbstractContextManager[None]:
    """Use these services in the block."""
    return ScopedVariable(_services, chosen)
