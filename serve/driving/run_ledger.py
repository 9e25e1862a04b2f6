"""RunLedger: where an endpoint keeps what it accepted, and the ledger that an address names.

Adapters: `Ledger`, a file on the head node; `PostgresLedger`, the database that records lie in. Every call blocks for a moment: it
is for threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.serve.driving.config import part_of_name
from ensemble_ray.serve.driving.ledger import Ledger, LedgerEntry
from ensemble_ray.serve.run_schemas import RunDetail, RunFilter, RunStatus


class RunLedger(Protocol):
    """The runs of one endpoint, in the one process that drives them.

    Each call raises `LedgerLostError` where another process has it now, and `EnsembleError` where it cannot be reached.
    """

    def add(self, entry: LedgerEntry) -> None:
        """Keep a run that is accepted; when this returns it survives the process, and a loss of power."""
        ...

    def note(self, run_id: str, status: RunStatus) -> None:
        """Note how a run stands that has not ended."""
        ...

    def end(self, run_id: str, outcome: RunDetail, *, kept: int) -> None:
        """Note what became of a run; its request is kept no more, and of runs that ended the newest `kept`."""
        ...

    def find(self, run_id: str) -> LedgerEntry | None:
        """Return the run of that id; None when there is none."""
        ...

    def find_key(self, key: str) -> LedgerEntry | None:
        """Return the run that was asked for under that key; None when there is none."""
        ...

    def list_unfinished(self) -> Sequence[LedgerEntry]:
        """Return the runs that have not ended, oldest first."""
        ...

    def page(self, wanted: RunFilter, *, before: int | None, size: int) -> Sequence[LedgerEntry]:
        """Return runs, newest first; see `Ledger.page`."""
        ...

    def close(self) -> None:
        """Let go of it, so that another process may have it."""
        ...


def open_ledger(address: StoreAddress, name: str, namespace: str = "") -> RunLedger:
    """Return the ledger of an endpoint whose runs are recorded at an address.

    Args:
        address: Where its runs are recorded.
        name: The endpoint's.
        namespace: Of the schedulers that have its runs; empty: the one without a name.

    Raises:
        RunExistsError: another process has it, and does not end.
        EnsembleError: the database cannot be reached, or refuses.
    """
    own = part_of_name(name)
    if not address.url:
        return Ledger(Path(address.home) / "endpoint" / namespace / f"{own}.sqlite")
    from ensemble_ray.serve.driving.postgres_ledger import PostgresLedger

    return PostgresLedger(address.url, f"{namespace}/{own}" if namespace else own)
