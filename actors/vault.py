"""Where the packages of running runs lie, so that a scheduler that was started again finds them (S-DUR-32).

In the cluster's own key-value store: it lives as long as the cluster does and no longer, as a run's definition should;
what must survive the cluster is in the record. Never: anything on disk.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, cast

from ray.experimental import internal_kv

from ensemble_ray.bounded_log import bounded_logger
from ensemble_ray.errors import message_of
from ensemble_ray.threads import threads

if TYPE_CHECKING:
    from actors.wire import RunPackage

__all__ = ["Vault"]

_log = bounded_logger(__name__)
_NAMESPACE = b"ensemble_ray"
_PREFIX = "run:"
#: The store that Ray's own libraries keep their state in; its functions have no other names.
_put, _get, _delete, _list = (getattr(internal_kv, f"_internal_kv_{name}") for name in ("put", "get", "del", "list"))


class Vault:
    """The packages of a cluster's runs. Calls take a millisecond each, in a thread."""

    async def keep(self, package: RunPackage) -> None:
        """Keep a run's package until it is dropped."""
        body = pickle.dumps(package, protocol=5)
        await threads.run(_put, _key(package.run_id), body, overwrite=True, namespace=_NAMESPACE)

    async def drop(self, run_id: str) -> None:
        """The run has ended."""
        await threads.run(_delete, _key(run_id), namespace=_NAMESPACE)

    async def kept(self) -> list[RunPackage]:
        """Packages of runs that have not ended. One that cannot be read, as of another version, is dropped."""
        found: list[RunPackage] = []
        for name in cast("list[bytes]", await threads.run(_list, _PREFIX, namespace=_NAMESPACE)):
            body = await threads.run(_get, name, namespace=_NAMESPACE)
            try:
                found += [] if body is None else [pickle.loads(body)]  # noqa: S301  bytes of our own scheduler
            except Exception as error:  # noqa: BLE001  one such run must not keep the others from going on
                run_id = name.decode().removeprefix(_PREFIX)
                _log.error("Run %s cannot go on: its package cannot be read: %s", run_id, message_of(error))
                await self.drop(run_id)
        return found


def _key(run_id: str) -> str:
    return f"{_PREFIX}{run_id}"
