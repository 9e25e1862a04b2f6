"""Webhooks: events of runs as signed POST requests in the form of Standard Webhooks, stored before they are sent.

A delivery is a document of the ledger, with its content in another one. The end of a run is stored with its deliveries in one
transaction. A delivery never delays a run.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import heapq
import hmac
import json
import os
import random
import sqlite3
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import islice
from typing import cast
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray import RunExistsError, ValidationError
from ensemble_ray.errors import EnsembleError
from ensemble_ray.errors.texts import describe
from ensemble_ray.ports import Clock
from ensemble_ray.process.concurrency import SystemClock, threads
from ensemble_ray.process.config import package_version
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.stores import RunStore
from ensemble_ray.serve import schemas
from ensemble_ray.serve.driving.ledger import Document, LedgerEntry, LedgerLostError, RunLedger
from ensemble_ray.serve.driving.run_driver import ActiveRun, open_gates
from ensemble_ray.serve.run_service import RunTally
from ensemble_ray.serve.schemas import DeliveryState, NewWebhook, Refusal, WebhookEvent

SECRET_VARIABLE = "ENSEMBLE_RAY_WEBHOOK_SECRET"  # noqa: S105  a name
#: Key of `webhooks` that means all teams, and element of `webhook_hosts` that means all hosts.
ANY = "*"
_SECRET_PREFIX = "whsec_"  # noqa: S105  of the format
_SECRET_BYTES = range(24, 65)
#: Kinds of documents; both have names of the form `RUN/DELIVERY`.
STATE_KIND, CONTENT_KIND = "webhook", "webhook_content"
MOST_CONTENT_BYTES = 256 * 1024
#: Time of retries, s, and pauses between them: the first one, its growth, and the longest one.
RETRY_FOR_S = 86_400.0
_FIRST_PAUSE_S, _PAUSE_GROWTH, _LONGEST_PAUSE_S = 5.0, 3.0, 3600.0
#: Bounds of one attempt, s and bytes of the answer.
_ATTEMPT_S, _MOST_ANSWER_BYTES = 15.0, 65_536
#: Attempts at the same time, in total and to one receiver.
_MOST_ATTEMPTS, _MOST_PER_RECEIVER = 32, 4
_SHOWN_ATTEMPTS = 10
#: Age at which ended deliveries are removed, s, and the number that one look removes.
_KEPT_S, _MOST_REMOVED = 7 * 86_400.0, 100
#: Interval of looks for open gates, s.
_LOOK_S = 1.0
_LONGEST_REASON = 300
_NOT_PUBLIC = "the host is not public, and the operator has not allowed it"
_log = bounded_logger(__name__)
_LEDGER_ERRORS = (EnsembleError, sqlite3.Error, OSError)


class WebhookSecrets:
    """Keys that sign. A team with keys of its own uses these alone."""

    def __init__(self, common: Sequence[bytes] = (), teams: Mapping[str, Sequence[bytes]] | None = None) -> None:
        self._common = tuple(common)
        self._teams = dict(teams or {})

    def has_key(self, team: str) -> bool:
        return bool(self._of(team))

    def sign(self, team: str, delivery_id: str, timestamp: int, content: bytes) -> str:
        """Return the header `webhook-signature`: a signature for each key of the team."""
        signed = b"%s.%d.%s" % (delivery_id.encode(), timestamp, content)
        digests = (hmac.digest(key, signed, "sha256") for key in self._of(team))
        return " ".join(f"v1,{base64.b64encode(each).decode()}" for each in digests)

    def _of(self, team: str) -> Sequence[bytes]:
        return self._teams.get(team, self._common)


def parse_secrets(text: str) -> WebhookSecrets:
    """Parse secrets between spaces: `whsec_BASE64` for all teams, or `TEAM=whsec_BASE64`. Errors show no secret."""
    common, teams = list[bytes](), defaultdict[str, list[bytes]](list)
    for number, word in enumerate(text.split(), 1):
        team, mark, encoded = word.rpartition(_SECRET_PREFIX)
        try:
            key = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            key = b""
        if not mark or len(key) not in _SECRET_BYTES or (team and not team.endswith("=")) or team == "=":
            raise ValidationError(
                f"{SECRET_VARIABLE}: secret {number} is invalid. Write whsec_ and 24 to 64 bytes in base64, with TEAM= in front of "
                'a secret of one team. Make one: echo "whsec_$(openssl rand -base64 32)"'
            )
        (teams[team[:-1]] if team else common).append(key)
    return WebhookSecrets(common, teams)


class WebhookRules(Struct, frozen=True, kw_only=True):
    """Rules of the operator: secrets, receivers of all runs of a team, and hosts besides public ones."""

    secrets: WebhookSecrets = msgspec.field(default_factory=WebhookSecrets)
    teams: Mapping[str, NewWebhook] = msgspec.field(default_factory=dict[str, NewWebhook])
    hosts: frozenset[str] = frozenset()

    def check(self, webhook: NewWebhook, team: str) -> None:
        """Raise a `Refusal` if a request may not name this webhook."""
        if not self.secrets.has_key(team):
            text = f"This endpoint has no secret to sign webhooks with. What to do: the operator sets {SECRET_VARIABLE}"
            raise Refusal(HTTPStatus.BAD_REQUEST, "WEBHOOK_NOT_CONFIGURED", text, param="webhook")
        if (problem := problem_of(webhook.url, self.hosts)) is not None:
            raise Refusal(HTTPStatus.BAD_REQUEST, "WEBHOOK_INVALID", f"webhook.url: {problem}", param="webhook.url")

    def receivers(self, asked: schemas.NewRun | None, team: str, event: WebhookEvent) -> list[NewWebhook]:
        named = [None if asked is None else asked.webhook, self.teams.get(team), self.teams.get(ANY)]
        found = {each.url: each for each in named if each is not None and event in each.events}
        return [*found.values()]


def driver_rules(teams: Mapping[str, NewWebhook], hosts: Iterable[str]) -> WebhookRules:
    """Return the rules of a run driver. Without a valid secret it signs nothing, and its log names the reason."""
    try:
        secrets = parse_secrets(os.environ.get(SECRET_VARIABLE, ""))
    except ValidationError as error:
        _log.error("Webhooks are not sent: %s", error)
        secrets = WebhookSecrets()
    if unsigned := sorted(each for each in teams if each != ANY and not secrets.has_key(each)):
        _log.error("Webhooks of the teams [%s] are not sent: set %s", ", ".join(unsigned), SECRET_VARIABLE)
    return WebhookRules(secrets=secrets, teams=teams, hosts=frozenset(each.lower() for each in hosts))


def check_secrets(teams: Iterable[str]) -> None:
    """Raise a `ValidationError` if the secrets of this process are invalid, or the webhooks of a team have none."""
    secrets = parse_secrets(os.environ.get(SECRET_VARIABLE, ""))
    if unsigned := sorted(each for each in teams if not secrets.has_key(each)):
        raise ValidationError(
            f'Webhooks of [{", ".join(unsigned)}] need a secret: export {SECRET_VARIABLE}="whsec_$(openssl rand -base64 32)"'
        )


def parse_webhooks(given: object) -> object:
    """Return receivers by team for pydantic, from texts `TEAM=URL`, between commas or in a list, or from a mapping.

    Examples:
        >>> parse_webhooks("letters=https://example.org/a?b=c")
        {'letters': {'url': 'https://example.org/a?b=c'}}
    """
    if isinstance(given, Mapping):
        by_team = cast("Mapping[object, object]", given)
        return {team: {"url": each} if isinstance(each, str) else each for team, each in by_team.items()}
    if not isinstance(given, str | list | tuple):
        return given
    texts = given.split(",") if isinstance(given, str) else map(str, cast("Sequence[object]", given))
    found: dict[str, dict[str, str]] = {}
    for text in filter(None, map(str.strip, texts)):
        team, equals, url = text.partition("=")
        if not (team and equals and url):
            raise ValueError("a webhook is TEAM=URL")
        found[team] = {"url": url}
    return found


def check_team_webhooks(teams: Mapping[str, NewWebhook], hosts: Iterable[str], known: Iterable[str]) -> None:
    """Raise a `ValidationError` for a webhook of an unknown team, or with a URL that is not allowed."""
    known, allowed = sorted(known), frozenset(each.lower() for each in hosts)
    for team, webhook in teams.items():
        if team != ANY and team not in known:
            raise ValidationError(
                f"webhooks: there is no team '{team}'. There are: [{', '.join(known)}], and '*' for all"
            )
        if (problem := problem_of(webhook.url, allowed)) is not None:
            raise ValidationError(f"webhooks: team '{team}': {problem}")


def problem_of(url: str, hosts: frozenset[str]) -> str | None:
    """Return the reason to refuse a URL before its host is resolved, or None. It shows no part that may be secret."""
    from ensemble_ray.tools.web.net import (
        RequestFailedError,
        checked_url,
        refusal_of,
    )  # heavy, and few runs have webhooks

    try:
        target = checked_url(url)
        has_user = "@" in urlsplit(url.strip()).netloc
    except RequestFailedError as error:
        return str(error)[:_LONGEST_REASON]
    except ValueError:
        return "it is no URL"
    host = (target.host or "").lower().rstrip(".")
    if has_user:
        return "it contains a user or a password, which are not sent"
    if ANY in hosts or host in hosts:
        return None
    is_address = ":" in host or host.replace(".", "").isdigit()
    if host == "localhost" or host.endswith(".localhost") or (is_address and refusal_of(host) is not None):
        return f"{_NOT_PUBLIC}. What to do: use a public host, or ask the operator to add the host to webhook_hosts"
    return None if target.scheme == "https" else "it must begin with https://"


def receiver_of(url: str) -> str:
    """Return scheme, host and port. Paths and queries may contain secrets.

    Examples:
        >>> receiver_of("https://hooks.example.org:8443/T0/secret?key=1")
        'https://hooks.example.org:8443'
    """
    parts = urlsplit(url.strip())
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"[:_LONGEST_REASON]


def retry_pause_s(count: int, jitter: float) -> float:
    """Return the pause behind attempt `count`, s. `jitter` is in [0, 1), and changes it by up to a quarter."""
    pause_s = min(_FIRST_PAUSE_S * _PAUSE_GROWTH ** min(count - 1, 20), _LONGEST_PAUSE_S)
    return pause_s * (0.75 + 0.5 * jitter)


#: In the order in which they are left out. Texts become empty, lists and objects too.
_OMITTABLE = (
    *(("result", "tasks"), ("error", "tasks"), ("result", "raw"), ("error", "causes"), ("error", "message")),
    *(("task_output",), ("task_description",), ("prompt",), ("reviews",), ("tags",)),
)


def content_of(event: WebhookEvent, at: datetime, data: schemas.Wire, *, most_bytes: int = MOST_CONTENT_BYTES) -> str:
    """Return the JSON of an event. Of a long one, `omitted` names the members that were emptied."""
    body = data.model_dump(mode="json")
    shown = {"type": event.value, "timestamp": at.isoformat(), "data": body}
    text = _json(shown)
    omitted = list[str]()
    for *parents, name in _OMITTABLE:
        if len(text) <= most_bytes:  # it is ASCII
            break
        holder = body
        for each in parents:
            holder = holder.get(each) or {}
        if holder.get(name):
            holder[name] = type(holder[name])()
            omitted.append(".".join([*parents, name]))
            text = _json({**shown, "omitted": omitted})
    return text


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


class _Attempt(Struct, frozen=True, kw_only=True, omit_defaults=True):
    at_s: float
    duration_s: float
    status: int | None = None
    error: str | None = None


class StoredDelivery(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of a delivery, as a document of the ledger. Times are Unix times, s."""

    delivery_id: str
    run_id: str
    ensemble: str
    event: WebhookEvent
    url: str
    gate_id: str | None = None
    created_at_s: float
    #: of the first attempt, or of the last redelivery; retries end `RETRY_FOR_S` later
    began_at_s: float
    #: None: it has ended
    due_at_s: float | None
    ended_at_s: float | None = None
    is_delivered: bool = False
    count: int = 0
    attempts: tuple[_Attempt, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.run_id}/{self.delivery_id}"

    @property
    def document(self) -> Document:
        return Document(kind=STATE_KIND, name=self.name, text=msgspec.json.encode(self).decode())

    def after(self, attempt: _Attempt, jitter: float) -> StoredDelivery:
        """Return the state after an attempt."""
        now = attempt.at_s + attempt.duration_s
        count = self.count + 1
        attempts = (*self.attempts, attempt)[-_SHOWN_ATTEMPTS:]
        done = replace(self, count=count, attempts=attempts, due_at_s=None, ended_at_s=now)
        if attempt.error is None:
            return replace(done, is_delivered=True)
        due_at_s = now + retry_pause_s(count, jitter)
        if attempt.status == HTTPStatus.GONE or due_at_s > self.began_at_s + RETRY_FOR_S:
            return done
        return replace(done, due_at_s=due_at_s, ended_at_s=None)

    def again(self, now_s: float) -> StoredDelivery:
        return replace(self, began_at_s=now_s, due_at_s=now_s, ended_at_s=None, is_delivered=False)

    def shown(self) -> schemas.WebhookDelivery:
        ended = DeliveryState.DELIVERED if self.is_delivered else DeliveryState.FAILED
        return schemas.WebhookDelivery(
            delivery_id=self.delivery_id,
            event=self.event,
            receiver=receiver_of(self.url),
            gate_id=self.gate_id,
            state=ended if self.due_at_s is None else DeliveryState.PENDING,
            created_at=_instant(self.created_at_s),
            attempt_count=self.count,
            attempts=[
                schemas.WebhookAttempt(
                    at=_instant(each.at_s), duration_s=each.duration_s, status=each.status, error=each.error
                )
                for each in self.attempts
            ],
            next_attempt_at=None if self.due_at_s is None else _instant(self.due_at_s),
            ended_at=None if self.ended_at_s is None else _instant(self.ended_at_s),
        )


def _instant(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)


def _delivery_id(entry: LedgerEntry, event: WebhookEvent, gate_id: str | None, url: str) -> str:
    """Return the same id for the same event and receiver, also in another process."""
    parts = [entry.run_id, entry.created_at.isoformat(), event.value, gate_id, url]
    return f"msg_{hashlib.sha256(_json(parts).encode()).hexdigest()[:32]}"


class NewDeliveries(Struct, frozen=True, kw_only=True):
    """Deliveries that begin once their documents are stored."""

    deliveries: tuple[StoredDelivery, ...] = ()
    documents: tuple[Document, ...] = ()


class Webhooks:
    """Sends the webhooks of an endpoint's runs, on the library's loop."""

    def __init__(
        self,
        ledger: RunLedger,
        rules: WebhookRules,
        store: Callable[[], RunStore],
        *,
        active: Mapping[str, ActiveRun],
        tally: RunTally,
        kept: int,
        on_lost: Callable[[RunExistsError], object],
        clock: Clock | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Prepare the deliveries. `kept` ended ones remain, `active` contains the runs that have not ended."""
        self._ledger = ledger
        self._rules = rules
        self._store = store
        self._active = active
        self._tally = tally
        self._kept = kept
        self._on_lost = on_lost
        self._clock = clock or SystemClock()
        self._jitter = jitter
        #: by name
        self._pending: dict[str, StoredDelivery] = {}
        #: oldest end first
        self._ended: OrderedDict[str, StoredDelivery] = OrderedDict()
        self._due: list[tuple[float, str]] = []
        #: names of due deliveries by receiver
        self._ready: dict[str, deque[str]] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._busy = Counter[str]()
        #: receivers whose failure was logged
        self._failing: set[str] = set()
        self._watched: dict[str, ActiveRun] = {}
        self._wake = asyncio.Event()
        self._pump_task: asyncio.Task[None] | None = None
        self._watch_task: asyncio.Task[None] | None = None

    def check(self, asked: schemas.NewRun, team: str) -> None:
        """Raise a `Refusal` if a request has a webhook that is not allowed."""
        if asked.webhook is not None:
            self._rules.check(asked.webhook, team)

    async def recover(self) -> None:
        """Continue the deliveries of an earlier process."""
        texts = await threads.run(self._ledger.documents, STATE_KIND)
        found = [msgspec.json.decode(each, type=StoredDelivery) for each in texts.values()]
        for each in sorted(found, key=lambda each: each.ended_at_s or 0.0):
            if each.due_at_s is None:
                self._ended[each.name] = each
            else:
                self._schedule(each)

    def close(self) -> Sequence[asyncio.Task[None]]:
        """Stop. Return the tasks that are ending; the next process sends what is pending."""
        tasks = [each for each in (self._pump_task, self._watch_task, *self._sending.values()) if each is not None]
        for each in tasks:
            each.cancel()
        return tasks

    async def end_of(self, entry: LedgerEntry, asked: schemas.NewRun | None, ended: schemas.RunDetail) -> NewDeliveries:
        """Return the deliveries of the end of a run, to store with the end."""
        receivers = self._rules.receivers(asked, entry.ensemble, WebhookEvent.RUN_ENDED)
        if not receivers:
            return NewDeliveries()
        at = ended.ended_at or _instant(self._clock.now())
        try:
            content = await threads.run(content_of, WebhookEvent.RUN_ENDED, at, ended)
        except Exception as error:  # noqa: BLE001  a defect must not prevent the end of the run
            _log.error("The end of run %s is not delivered: %s", entry.run_id, describe(error))
            return NewDeliveries()
        return self._new(entry, WebhookEvent.RUN_ENDED, None, receivers, content)

    def begin(self, new: NewDeliveries) -> None:
        """Send deliveries whose documents are stored."""
        for each in new.deliveries:
            self._schedule(each)

    def watch(self, active: ActiveRun) -> None:
        """Report the reviews of an active run, if a webhook requests them."""
        team = active.entry.ensemble
        if not self._rules.receivers(active.asked, team, WebhookEvent.REVIEW_REQUESTED):
            return
        if not active.team.definition.is_detached:
            return
        self._watched[active.entry.run_id] = active
        if self._watch_task is None:
            self._watch_task = asyncio.create_task(self._watch())

    async def deliveries(self, run_id: str) -> Sequence[schemas.WebhookDelivery]:
        texts = await threads.run(lambda: self._ledger.documents(STATE_KIND, prefix=f"{run_id}/"))
        found = [msgspec.json.decode(each, type=StoredDelivery) for each in texts.values()]
        return [each.shown() for each in sorted(found, key=lambda each: (each.created_at_s, each.delivery_id))]

    async def redeliver(self, run_id: str, delivery_id: str) -> schemas.WebhookDelivery:
        name = f"{run_id}/{delivery_id}"
        delivery = self._pending.get(name) or self._ended.get(name)
        if delivery is None:
            text = f"Run '{run_id}' has no delivery '{delivery_id[:200]}'. GET /runs/{run_id}/deliveries lists them"
            raise Refusal(HTTPStatus.NOT_FOUND, "DELIVERY_NOT_FOUND", text, run_id=run_id)
        if name in self._sending:
            return delivery.shown()
        again = delivery.again(self._clock.now())
        await threads.run(self._ledger.put, again.document)
        if name not in self._sending:
            self._ended.pop(name, None)
            self._schedule(again)
        return again.shown()

    def _new(
        self,
        entry: LedgerEntry,
        event: WebhookEvent,
        gate_id: str | None,
        receivers: Iterable[NewWebhook],
        content: str,
    ) -> NewDeliveries:
        now = self._clock.now()
        made = [
            StoredDelivery(
                delivery_id=_delivery_id(entry, event, gate_id, each.url),
                run_id=entry.run_id,
                ensemble=entry.ensemble,
                event=event,
                url=each.url,
                gate_id=gate_id,
                created_at_s=now,
                began_at_s=now,
                due_at_s=now,
            )
            for each in receivers
        ]
        new = tuple(each for each in made if each.name not in self._pending and each.name not in self._ended)
        contents = [Document(kind=CONTENT_KIND, name=each.name, text=content) for each in new]
        return NewDeliveries(deliveries=new, documents=(*(each.document for each in new), *contents))

    def _schedule(self, delivery: StoredDelivery) -> None:
        self._pending[delivery.name] = delivery
        heapq.heappush(self._due, (delivery.due_at_s or 0.0, delivery.name))
        self._wake.set()
        if self._pump_task is None:
            self._pump_task = asyncio.create_task(self._pump())

    async def _pump(self) -> None:
        """Start each delivery when it is due and its receiver has a free place."""
        while True:
            self._wake.clear()
            now = self._clock.now()
            while self._due and self._due[0][0] <= now:
                _, name = heapq.heappop(self._due)
                if (delivery := self._pending.get(name)) is not None:
                    self._ready.setdefault(receiver_of(delivery.url), deque()).append(name)
            self._start_ready()
            napping = asyncio.create_task(self._nap(self._due[0][0] - now)) if self._due else None
            try:
                await self._wake.wait()
            finally:
                if napping is not None:
                    napping.cancel()

    async def _nap(self, delay_s: float) -> None:
        await self._clock.sleep(max(0.0, delay_s))
        self._wake.set()

    def _start_ready(self) -> None:
        """Start one delivery of each receiver in turn, so that slow receivers delay no other."""
        has_started = True
        while has_started:
            has_started = False
            for receiver, names in list(self._ready.items()):
                if len(self._sending) >= _MOST_ATTEMPTS:
                    return
                if self._busy[receiver] < _MOST_PER_RECEIVER:
                    name = names.popleft()
                    if not names:
                        del self._ready[receiver]
                    if self._is_due(name) and name not in self._sending:
                        self._busy[receiver] += 1
                        self._sending[name] = asyncio.create_task(self._deliver(name, receiver))
                    has_started = True

    def _is_due(self, name: str) -> bool:
        delivery = self._pending.get(name)
        return delivery is not None and (delivery.due_at_s or 0.0) <= self._clock.now()

    async def _deliver(self, name: str, receiver: str) -> None:
        delivery = self._pending[name]
        try:
            contents = await threads.run(lambda: self._ledger.documents(CONTENT_KIND, prefix=name))
            attempt = await self._attempt(delivery, contents.get(name, ""))
            done = delivery.after(attempt, self._jitter())
            await threads.run(self._ledger.put, done.document)
        except LedgerLostError as error:  # the new owner sends it
            self._on_lost(error)
        except Exception as error:  # noqa: BLE001  any defect must not end the other deliveries
            reason = describe(error) if isinstance(error, _LEDGER_ERRORS) else type(error).__name__
            _log.warning("A webhook of run %s is repeated, since its state was not stored: %s", delivery.run_id, reason)
            due_at_s = self._clock.now() + retry_pause_s(delivery.count + 1, self._jitter())
            self._schedule(replace(delivery, due_at_s=due_at_s))
        else:
            self._note(done, receiver)
            await self._remove_old()
        finally:
            del self._sending[name]
            self._busy[receiver] -= 1
            if not self._busy[receiver]:
                del self._busy[receiver]
            self._wake.set()

    async def _attempt(self, delivery: StoredDelivery, content: str) -> _Attempt:
        from ensemble_ray.tools.web.net import AddressRefusedError, RequestFailedError, exchange  # see `problem_of`

        loop, started_s = asyncio.get_running_loop(), self._clock.now()
        body, team, hosts = content.encode(), delivery.ensemble, self._rules.hosts
        before_s = loop.time()
        status: int | None = None
        if not self._rules.secrets.has_key(team):
            error: str | None = f"{SECRET_VARIABLE} has no secret for the team"
        elif (error := problem_of(delivery.url, hosts)) is None:
            host = (urlsplit(delivery.url.strip()).hostname or "").lower().rstrip(".")
            headers = {
                "content-type": "application/json",
                "user-agent": f"ensemble-ray/{package_version()}",
                "webhook-id": delivery.delivery_id,
                "webhook-timestamp": str(int(started_s)),
                "webhook-signature": self._rules.secrets.sign(team, delivery.delivery_id, int(started_s), body),
            }
            try:
                answer = await exchange(
                    "POST",
                    delivery.url,
                    headers=headers,
                    body=body,
                    max_bytes=_MOST_ANSWER_BYTES,
                    timeout_s=_ATTEMPT_S,
                    allow_private_hosts=ANY in hosts or host in hosts,
                )
            except AddressRefusedError:
                error = _NOT_PUBLIC  # the address is the operator's network
            except RequestFailedError as failed:
                error = str(failed)[:_LONGEST_REASON]
            else:
                status = answer.status
                error = None if answer.is_success else f"HTTP {status}"
        return _Attempt(at_s=started_s, duration_s=round(loop.time() - before_s, 3), status=status, error=error)

    def _note(self, done: StoredDelivery, receiver: str) -> None:
        """Log and count an attempt whose result is stored, and schedule the next one."""
        name, last = done.name, done.attempts[-1]
        if done.due_at_s is not None:
            self._tally.deliver(done.ensemble, "retried")
            if receiver not in self._failing:
                self._failing.add(receiver)
                _log.warning("Webhooks to %s fail, and are retried for a day: %s", receiver, last.error)
            self._schedule(done)
            return
        self._pending.pop(name, None)
        self._ended[name] = done
        if done.is_delivered:
            self._tally.deliver(done.ensemble, "delivered")
            if receiver in self._failing:
                self._failing.discard(receiver)
                _log.info("Webhooks to %s succeed again", receiver)
        else:
            self._tally.deliver(done.ensemble, "failed")
            text = "The webhook '%s' of run %s to %s failed for the last time, after %d attempts: %s"
            _log.warning(text, done.event.value, done.run_id, receiver, done.count, last.error)

    async def _remove_old(self) -> None:
        """Remove ended deliveries that are old or too many, but none of an active run, whose gates would be reported again."""
        before_s, surplus = self._clock.now() - _KEPT_S, len(self._ended) - self._kept
        some = islice(self._ended.values(), _MOST_REMOVED)
        old = [
            each.name
            for number, each in enumerate(some)
            if (number < surplus or (each.ended_at_s or 0.0) < before_s) and each.run_id not in self._active
        ]
        if not old:
            return
        removed = [Document(kind=kind, name=name, text=None) for name in old for kind in (STATE_KIND, CONTENT_KIND)]
        for name in old:
            del self._ended[name]
        try:
            await threads.run(self._ledger.put, *removed)
        except _LEDGER_ERRORS as error:  # the next process removes them
            _log.warning("Could not remove old deliveries: %s", describe(error))

    async def _watch(self) -> None:
        """Report open gates of watched runs, also those of runs that work on other tasks."""
        while self._watched:
            await self._clock.sleep(_LOOK_S)
            self._watched = {run_id: each for run_id, each in self._watched.items() if self._active.get(run_id) is each}
            begun = {run_id: each for run_id, each in self._watched.items() if each.has_begun}
            if not begun:
                continue
            try:
                for gate in await open_gates(self._store(), begun, None):
                    await self._report(begun[gate.run_id], gate)
            except LedgerLostError as error:
                self._on_lost(error)
                return
            except Exception as error:  # noqa: BLE001  a defect must not end the reports of other runs
                _log.warning("Could not look for open reviews, retrying: %s", describe(error))
        self._watch_task = None

    async def _report(self, active: ActiveRun, gate: schemas.ReviewOfEnsemble) -> None:
        event, entry = WebhookEvent.REVIEW_REQUESTED, active.entry
        receivers = self._rules.receivers(active.asked, entry.ensemble, event)
        names = [f"{entry.run_id}/{_delivery_id(entry, event, gate.gate_id, each.url)}" for each in receivers]
        if all(each in self._pending or each in self._ended for each in names):
            return
        content = await threads.run(content_of, event, gate.created_at, cast("schemas.Wire", gate))
        new = self._new(entry, event, gate.gate_id, receivers, content)
        await threads.run(self._ledger.put, *new.documents)
        self.begin(new)
