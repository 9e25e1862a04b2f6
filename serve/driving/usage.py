"""Counts the runs of keys against their quotas, in the transactions of the ledger that store the runs (48)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from decimal import Decimal
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol
from zoneinfo import ZoneInfo

from ensemble_ray import RunOptions
from ensemble_ray.access.quotas import CHARGE, USAGE, Account, Allowance, Exceeded, Quantity, Standing, UsageBook
from ensemble_ray.definition.validation import find_unpriced
from ensemble_ray.errors import EnsembleError, IllegalStateError
from ensemble_ray.errors.texts import describe
from ensemble_ray.facts.fact import kinds_of
from ensemble_ray.process.concurrency import SystemClock, threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.head import read_head
from ensemble_ray.record.resume.reading import read_pages
from ensemble_ray.record.totals import PAID, UsageTally
from ensemble_ray.runs.launching import decide_costs
from ensemble_ray.serve import schemas
from ensemble_ray.serve.driving.ledger import Document, RunLedger
from ensemble_ray.serve.schemas import Refusal
from ensemble_ray.teamfile import Runnable
from ensemble_ray.values.metrics import NOTHING, Amount, units_of

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RunStore

_log = bounded_logger(__name__)


class LedgerWrite(Protocol):
    """A call that writes a run and documents to the ledger. It blocks."""

    def __call__(self, *documents: Document) -> None: ...


class UsageWriter:
    """The usage of all keys of an endpoint. Its calls are made on one event loop."""

    def __init__(
        self, ledger: RunLedger, count: Callable[[str, str, float], None], zone: str, store: Callable[[], RunStore]
    ) -> None:
        """Prepare the usage. `count` receives a key, a quantity and its increase, for metrics."""
        self._ledger = ledger
        self._count = count
        self._store = store
        self._book = UsageBook(ZoneInfo(zone))
        self._clock = SystemClock()
        #: keeps the order of the book's changes in the ledger
        self._writing = asyncio.Lock()

    async def load(self, unfinished: Iterable[str]) -> None:
        """Use the documents of an earlier process, and charge runs that ended without it."""
        usage = await threads.run(self._ledger.documents, USAGE)
        charges = await threads.run(self._ledger.documents, CHARGE)
        self._book.load(usage, charges)
        for run_id in sorted(charges.keys() - set(unfinished)):
            await self.charge(run_id, None, None)
            await self.write_with(run_id, self._ledger.put)

    def standing(self, account: Account) -> Standing:
        return self._book.standing(account, at=self._clock.now())

    def allowance_of(self, run_id: str) -> Allowance:
        charge = self._book.charge_of(run_id)
        return Allowance() if charge is None else charge.allowance

    def begin(self, account: Account, run_id: str, options: RunOptions, definition: Runnable) -> Allowance:
        """Reserve what a new run may use. `Refusal`: its key has a quota that is used up."""
        cost = options.max_cost
        wanted = Allowance(tokens=options.max_tokens, cost=None if cost is None else units_of(Decimal(str(cost))))
        has_cost = account.quotas.cost is not None
        is_priced = has_cost and find_unpriced(definition) is None
        found = self._book.begin(account, run_id, wanted, at=self._clock.now(), is_priced=is_priced)
        if not isinstance(found, Exceeded):
            return found
        _log.warning("Refused a run of key '%s': its quota of %s is used up", account.name, found.quantity)
        status = HTTPStatus.TOO_MANY_REQUESTS
        raise Refusal(status, "QUOTA_EXCEEDED", str(found), retry_after_s=found.retry_after_s, run_id=run_id)

    async def charge(self, run_id: str, definition: Runnable | None, ended: schemas.RunDetail | None) -> None:
        """Charge an ended run to its key, once. Its record counts, with unfinished tasks (S-QUO-20)."""
        if self._book.charge_of(run_id) is None:
            return
        spent = (await self._recorded(run_id, definition)).at_least(_reported(ended))
        if key := self._book.end(run_id, spent):
            self._count(key, Quantity.TOKENS, spent.tokens)
            self._count(key, Quantity.COST, spent.cost / units_of(Decimal(1)))

    async def write_with(self, run_id: str, write: LedgerWrite) -> None:
        """Write a run to the ledger, with the changes of its key's usage."""
        if not self._book.changes(run_id):
            await threads.run(write)
            return
        async with self._writing:
            changes = self._book.changes(run_id)
            await threads.run(write, *(Document(kind=kind, name=name, text=text) for kind, name, text in changes))
            self._book.confirm(changes)

    async def add(self, run_id: str, write: LedgerWrite) -> None:
        """Write a new run. If that fails, it does not count."""
        charge = self._book.charge_of(run_id)
        try:
            await self.write_with(run_id, write)
        except BaseException:
            self._book.abandon(run_id)
            raise
        if charge is not None:
            self._count(charge.key, Quantity.RUNS, 1)

    async def _recorded(self, run_id: str, definition: Runnable | None) -> Amount:
        try:
            store = self._store()
            header = (await read_head(store, run_id)).header
            tally = UsageTally(None if definition is None else await decide_costs(definition, header))
            await read_pages(store, run_id, kinds_of(*PAID), tally.apply_all)
        except (EnsembleError, IllegalStateError) as error:
            _log.warning("Run %s is charged what it reported, without its record: %s", run_id, describe(error))
            return NOTHING
        return tally.spent


def _reported(ended: schemas.RunDetail | None) -> Amount:
    """Return the usage in the result of a run, for a run without a record."""
    if ended is None:
        return NOTHING
    if ended.result is not None:
        metrics = [ended.result.metrics]
    else:
        metrics = [] if ended.error is None else [task.metrics for task in ended.error.tasks]
    total = NOTHING
    for each in metrics:
        cost = 0 if each.cost is None else units_of(Decimal(each.cost.total))
        total += Amount((each.input_tokens or 0) + (each.output_tokens or 0), cost)
    return total
