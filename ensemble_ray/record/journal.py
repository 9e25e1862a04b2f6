"""MemoryJournal, and what every journal shares: who may write, and what is known.

In: facts of one run. Out: what is recorded of an instance. Never: a write of a writer that a newer one replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import cast

from pydantic_core import from_json, to_json

from ensemble_ray.errors import IllegalStateError, StaleEpochError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import LossAccepted, StimulusRecorded
from ensemble_ray.ports import Persistence
from ensemble_ray.values.ids import RUN
from ensemble_ray.values.trace import jsonable

#: Version of the record format; a reader refuses a newer one.
FORMAT = 2
#: Longest text that stays in its fact, characters.
BODY_LIMIT = 1024
#: Longest text that is one body, characters. Longer ones lie there in pieces, so that texts that grow at their end, such as
#: the prompts of a long loop with short-term memory, share what they begin with.
WHOLE_LIMIT = 16_384
#: Length of a piece, characters; the last one is as long as what is left.
_PIECE = 8192
#: Key of a text that lies among the bodies.
_BODY = "$body"
#: Key of the pieces of a text, each as a text that lies among the bodies.
_PIECES = "$pieces"
#: What every fact's text holds that refers to one.
BODY_MARK = f'"{_BODY}"'
#: What users' own keys of that look are written as, with one `$` more each time.
_ESCAPED = re.compile(r"\$+(?:body|pieces)")

#: In JSON text without escaped quotes: a long text. What stands between two texts may be taken for one; it only costs time.
_LONG = re.compile(rb'"[^"]{%d}' % (BODY_LIMIT + 1))

#: Keeps a long text and gives its hash.
Keep = Callable[[str], str]
#: Gives the text of a hash.
Resolve = Callable[[str], str]


def body_digest(text: str) -> str:
    """Return the SHA-256 of a text in hex; the name of a body."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def plain_data(data: Mapping[str, object]) -> dict[str, object]:
    """Return some data as JSON data."""
    return cast("dict[str, object]", json.loads(_as_text(data)))


def in_json_form(fact: Fact, *, epoch: int | None = None, seq: int | None = None) -> Fact:
    """Return the fact as a reader of the record gets it: what it tells as JSON data."""
    return replace(
        fact,
        data=fact.data.from_data(plain_data(fact.data.to_data()), fact.at),
        epoch=fact.epoch if epoch is None else epoch,
        seq=fact.seq if seq is None else seq,
    )


def text_of(data: Mapping[str, object], keep: Keep) -> str:
    """Return a fact's data as JSON text; long texts go to `keep`."""
    text = _as_text(data)
    if _may_need_lifting(text):
        text = _as_text(_lift(_parse(text), keep))
    return text.decode()


def _may_need_lifting(text: bytes) -> bool:
    """Whether JSON text may hold a long text or a key to escape; looking costs far less than taking it apart."""
    if b'$body"' in text or b'$pieces"' in text:
        return True
    # No text is longer than its JSON form.
    return len(text) > BODY_LIMIT and (b'\\"' in text or _LONG.search(text) is not None)


def data_of(text: str, resolve: Resolve) -> dict[str, object]:
    """Return the data of a fact from its JSON text.

    Raises:
        ValueError: it is no data of a fact.
    """
    read: object = json.loads(text)
    if not isinstance(read, dict):
        msg = "the data of a fact is an object"
        raise ValueError(msg)  # noqa: TRY004  the text is wrong, not a type of ours
    return {key: _lower(value, resolve) for key, value in cast("dict[str, object]", read).items()}


def stored_text(body: object) -> str:
    """Return a body as it lies in a store as text; empty where it is nothing that can be one, which no body is."""
    if not isinstance(body, bytes):
        return body if isinstance(body, str) else ""
    try:
        return body.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return ""


def missing_text(digest: str) -> str:
    """Return what a reader shows in place of a body that is not there."""
    return f"[text {digest} is missing from the record]"


def accepted_loss(text: object) -> LossAccepted:
    """Return what the JSON text of a fact tells of a loss that somebody accepted; an empty one where it cannot be read."""
    try:
        read: object = json.loads(str(text))
        return LossAccepted.from_data(cast("dict[str, object]", read) if isinstance(read, dict) else {}, 0.0)
    except ValueError:  # the reader of that fact is told
        return LossAccepted.from_data({}, 0.0)


def _as_text(data: object) -> bytes:
    try:
        return to_json(data, fallback=str, inf_nan_mode="strings")
    except Exception:  # noqa: BLE001  cycles, halves of surrogate pairs, objects whose own serializers fail
        return json.dumps(jsonable(data)).encode()


def _parse(text: bytes) -> object:
    try:
        return from_json(text)
    except ValueError:  # halves of surrogate pairs and very deep data are beyond the fast parser
        return json.loads(text)


def _lift(value: object, keep: Keep) -> object:
    """JSON data with its long texts replaced by references."""
    if isinstance(value, str):
        return _lifted_text(value, keep) if len(value) > BODY_LIMIT else value
    if isinstance(value, dict):
        return _lifted_mapping(cast("dict[str, object]", value), keep)
    if isinstance(value, list):
        return [_lift(each, keep) for each in cast("list[object]", value)]
    return value


def _lifted_text(text: str, keep: Keep) -> dict[str, object]:
    if len(text) <= WHOLE_LIMIT:
        return {_BODY: keep(text)}
    return {_PIECES: [{_BODY: keep(text[start : start + _PIECE])} for start in range(0, len(text), _PIECE)]}


def _lifted_mapping(value: dict[str, object], keep: Keep) -> dict[str, object]:
    if len(value) == 1:
        (key,) = value
        if _ESCAPED.fullmatch(key):
            return {f"${key}": _lift(value[key], keep)}
    return {key: _lift(each, keep) for key, each in value.items()}


def _lower(value: object, resolve: Resolve) -> object:
    """JSON data with its references replaced by their texts."""
    if isinstance(value, dict):
        mapping = cast("dict[str, object]", value)
        if len(mapping) == 1:
            ((key, only),) = mapping.items()
            if key == _BODY and isinstance(only, str):
                return resolve(only)
            if key == _PIECES:
                return _join(only, resolve)
            if _ESCAPED.fullmatch(key):
                return {key.removeprefix("$"): _lower(only, resolve)}
        return {key: _lower(each, resolve) for key, each in mapping.items()}
    if isinstance(value, list):
        return [_lower(each, resolve) for each in cast("list[object]", value)]
    return value


def _join(value: object, resolve: Resolve) -> object:
    """Return the text of some pieces; data of users of before there were pieces is left as it is."""
    pieces = cast("list[dict[str, object]]", value) if isinstance(value, list) else []
    if not pieces or not all(isinstance(each, dict) and list(each) == [_BODY] for each in pieces):
        return {_PIECES: _lower(value, resolve)}
    return "".join(str(_lower(each, resolve)) for each in pieces)


class EpochFence:
    """Knows the newest epoch of a run and of each of its instances; refuses older ones."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._newest: dict[str, int] = {}

    def learn(self, instance: str, epoch: int) -> None:
        """From now on, facts of that instance (`run`: of all) need that epoch or a newer one."""
        if epoch > self._newest.get(instance, 0):
            self._newest[instance] = epoch

    def admit(self, facts: Sequence[Fact], epoch: int) -> None:
        """Let these facts pass, all or none.

        Raises:
            StaleEpochError: a newer epoch of the run or of an instance has been seen.
        """
        if epoch or self._newest:  # else the hot path: nothing was ever dispatched twice
            self.admit_instances({fact.fence for fact in facts}, epoch)

    def admit_instances(self, instances: Collection[str], epoch: int) -> None:
        """Let facts of these instances pass, all or none.

        Raises:
            StaleEpochError: a newer epoch of the run or of an instance has been seen.
        """
        of_run = self._newest.get(RUN, 0)
        for instance in instances:
            newest = max(of_run, self._newest.get(instance, 0))
            if epoch < newest:
                raise StaleEpochError(self._run_id, instance, epoch, newest)
        if epoch > of_run:
            for instance in instances:
                self._newest[instance] = epoch


class MemoryJournal:
    """One run's facts in memory, gone with the process."""

    def __init__(self, run_id: str, known: Sequence[Fact] = ()) -> None:
        """Begin with facts that are known already."""
        self.run_id = run_id
        self._facts: list[tuple[Fact, int]] = []
        self._fence = EpochFence(run_id)
        self._is_closed = False
        for fact in known:
            self._fence.learn(fact.fence, fact.epoch)
            self._facts.append((fact, fact.epoch))

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:  # noqa: ARG002  memory is as safe as it gets
        """Add facts in order; their data must not change afterwards.

        Raises:
            StaleEpochError: a newer epoch has been seen.
            IllegalStateError: the journal is closed.
        """
        if self._is_closed:
            msg = f"The journal of run '{self.run_id}' is closed"
            raise IllegalStateError(msg)
        self._fence.admit(facts, epoch)
        self._facts += [(fact, epoch) for fact in facts]

    async def lookup_recorded(self, instance: str) -> Mapping[tuple[str, str], Fact]:
        """Return what is recorded of an instance: (name, kind) -> its newest fact, stimuli left out."""
        return {
            (fact.name, fact.kind): in_json_form(fact, epoch=epoch, seq=seq)
            for seq, (fact, epoch) in enumerate(self._facts, start=1)
            if not isinstance(fact.data, StimulusRecorded) and fact.fence in {instance, LossAccepted.FENCE}
        }

    def facts(self) -> list[Fact]:
        """All facts in order, as a reader of a file would get them."""
        return [in_json_form(fact, epoch=epoch, seq=seq) for seq, (fact, epoch) in enumerate(self._facts, start=1)]

    async def flush(self) -> None:
        """Nothing to wait for."""

    async def close(self) -> None:
        """Take no more facts; they stay readable."""
        self._is_closed = True


class ForgetfulJournal:
    """The journal of a run that is recorded nowhere and may have millions of facts: it refuses stale epochs, keeps nothing."""

    def __init__(self, run_id: str) -> None:
        self._fence = EpochFence(run_id)

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:  # noqa: ARG002  as safe as it gets
        """Let facts pass.

        Raises:
            StaleEpochError: a newer epoch has been seen.
        """
        self._fence.admit(facts, epoch)

    async def lookup_recorded(self, instance: str) -> Mapping[tuple[str, str], Fact]:  # noqa: ARG002  nothing is known of any
        """Nothing."""
        return {}

    async def flush(self) -> None:
        """Nothing to wait for."""

    async def close(self) -> None:
        """Nothing is open."""
