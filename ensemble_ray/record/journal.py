"""MemoryJournal, the JSON form of facts with their long texts, and the fence against writers of an older epoch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import sha256
from typing import cast

from msgspec.structs import replace
from pydantic_core import from_json, to_json

from ensemble_ray.errors import IllegalStateError, StaleEpochError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import LossAccepted, StimulusRecorded
from ensemble_ray.ports import Persistence
from ensemble_ray.values.ids import RUN
from ensemble_ray.values.trace import jsonable

SOON_S = 0.002  # Longest time until the commit of a fact that is needed soon, s. A model call takes longer.
FORMAT = 5  # Version of the format. A reader accepts those from `OLDEST_FORMAT` on; a writer raises its file's.
OLDEST_FORMAT = 2
BODY_LIMIT = 1024  # Longest text that stays in its fact, characters.
WHOLE_LIMIT = 16_384  # Longest text in one body, characters. Growing texts share their first pieces.
_PIECE = 8192  # Characters; the last piece may be shorter.
_BODY = "$body"
_PIECES = "$pieces"
BODY_MARK = f'"{_BODY}"'  # Part of the JSON text of every fact that refers to a body.
REFERENCE = re.compile(r'"\$body":\s*"([0-9a-f]{64})"')  # Users' keys of this form have an additional `$`.
_ESCAPED = re.compile(r"\$+(?:body|pieces)")  # Users' own keys of this form; writing adds one `$`.

#: A long JSON text without escaped quotes. A match between two strings only costs time.
_LONG = re.compile(rb'"[^"]{%d}' % (BODY_LIMIT + 1))

Keep = Callable[[str], str]  # Stores a long text and returns its hash.
Resolve = Callable[[str], str]


def body_digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def plain_data(data: Mapping[str, object]) -> dict[str, object]:
    return cast("dict[str, object]", json.loads(_as_text(data)))


def in_json_form(fact: Fact, *, epoch: int | None = None, seq: int | None = None) -> Fact:
    return replace(
        fact,
        data=fact.data.from_data(plain_data(fact.data.to_data()), fact.at),
        epoch=fact.epoch if epoch is None else epoch,
        seq=fact.seq if seq is None else seq,
    )


def text_of(data: Mapping[str, object], keep: Keep) -> str:
    text = _as_text(data)
    # Much cheaper than parsing. No text is longer than its JSON form.
    has_long = len(text) > BODY_LIMIT and (b'\\"' in text or _LONG.search(text) is not None)
    if has_long or b'$body"' in text or b'$pieces"' in text:
        try:
            parsed: object = from_json(text)
        except ValueError:  # halves of surrogate pairs and very deep data are beyond the fast parser
            parsed = json.loads(text)
        text = _as_text(_lift(parsed, keep))
    return text.decode()


def data_of(text: str, resolve: Resolve) -> dict[str, object]:
    """Parse the data of a fact; a `ValueError` means that it is no data of a fact."""
    read: object = json.loads(text)
    if not isinstance(read, dict):
        raise ValueError("the data of a fact is an object")  # noqa: TRY004  the text is wrong, not a type of ours
    return {key: _lower(value, resolve) for key, value in cast("dict[str, object]", read).items()}


def stored_text(body: object) -> str:
    if not isinstance(body, bytes):
        return body if isinstance(body, str) else ""
    try:
        return body.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return ""


def missing_text(digest: str) -> str:
    return f"[text {digest} is missing from the record]"


def accepted_loss(text: object) -> LossAccepted:
    """Parse the JSON text of a fact about an accepted loss; return an empty one if it is invalid."""
    try:
        read: object = json.loads(str(text))
        return LossAccepted.from_data(cast("dict[str, object]", read) if isinstance(read, dict) else {}, 0.0)
    except ValueError:  # reading that fact raises
        return LossAccepted.from_data({}, 0.0)


def _as_text(data: object) -> bytes:
    try:
        return to_json(data, fallback=str, inf_nan_mode="strings")
    except Exception:  # noqa: BLE001  cycles, halves of surrogate pairs, failing serializers of objects
        return json.dumps(jsonable(data)).encode()


def _lift(value: object, keep: Keep) -> object:
    if isinstance(value, str):
        if len(value) <= BODY_LIMIT:
            return value
        if len(value) <= WHOLE_LIMIT:
            return {_BODY: keep(value)}
        return {_PIECES: [{_BODY: keep(value[start : start + _PIECE])} for start in range(0, len(value), _PIECE)]}
    if isinstance(value, dict):
        mapping = cast("dict[str, object]", value)
        if len(mapping) == 1:
            ((key, only),) = mapping.items()
            if _ESCAPED.fullmatch(key):
                return {f"${key}": _lift(only, keep)}
        return {key: _lift(each, keep) for key, each in mapping.items()}
    if isinstance(value, list):
        return [_lift(each, keep) for each in cast("list[object]", value)]
    return value


def _lower(value: object, resolve: Resolve) -> object:
    if isinstance(value, dict):
        mapping = cast("dict[str, object]", value)
        if len(mapping) == 1:
            ((key, only),) = mapping.items()
            if key == _BODY and isinstance(only, str):
                return resolve(only)
            if key == _PIECES:
                pieces = cast("list[dict[str, object]]", only) if isinstance(only, list) else []
                if pieces and all(isinstance(each, dict) and list(each) == [_BODY] for each in pieces):
                    return "".join(str(_lower(each, resolve)) for each in pieces)
                return {_PIECES: _lower(only, resolve)}  # users' data from before pieces existed
            if _ESCAPED.fullmatch(key):
                return {key.removeprefix("$"): _lower(only, resolve)}
        return {key: _lower(each, resolve) for key, each in mapping.items()}
    if isinstance(value, list):
        return [_lower(each, resolve) for each in cast("list[object]", value)]
    return value


class EpochFence:
    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._newest: dict[str, int] = {}

    def learn(self, instance: str, epoch: int) -> None:
        """Require this epoch or a newer one for facts of that instance (`run`: of all instances)."""
        if epoch > self._newest.get(instance, 0):
            self._newest[instance] = epoch

    def admit(self, facts: Sequence[Fact], epoch: int) -> None:
        if epoch or self._newest:  # skipped on the hot path, without repeated dispatches
            self.admit_instances({fact.fence for fact in facts}, epoch)

    def admit_instances(self, instances: Collection[str], epoch: int) -> None:
        of_run = self._newest.get(RUN, 0)
        for instance in instances:
            newest = max(of_run, self._newest.get(instance, 0))
            if epoch < newest:
                raise StaleEpochError(self._run_id, instance, epoch, newest)
        if epoch > of_run:
            for instance in instances:
                self._newest[instance] = epoch


class MemoryJournal:
    def __init__(self, run_id: str, known: Sequence[Fact] = ()) -> None:
        self.run_id = run_id
        self._facts: list[tuple[Fact, int]] = []
        self._fence = EpochFence(run_id)
        self._is_closed = False
        for fact in known:
            self._fence.learn(fact.fence, fact.epoch)
            self._facts.append((fact, fact.epoch))

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:  # noqa: ARG002  memory is as safe as it gets
        if self._is_closed:
            raise IllegalStateError(f"The journal of run '{self.run_id}' is closed")
        self._fence.admit(facts, epoch)
        self._facts += [(fact, epoch) for fact in facts]

    async def lookup_recorded(self, instance: str) -> Mapping[tuple[str, str], Fact]:
        return {
            (fact.name, fact.kind): in_json_form(fact, epoch=epoch, seq=seq)
            for seq, (fact, epoch) in enumerate(self._facts, start=1)
            if not isinstance(fact.data, StimulusRecorded) and fact.fence in {instance, LossAccepted.FENCE}
        }

    def facts(self) -> list[Fact]:
        return [in_json_form(fact, epoch=epoch, seq=seq) for seq, (fact, epoch) in enumerate(self._facts, start=1)]

    async def store_content(self, content: bytes) -> bool:  # noqa: ARG002  tasks keep their attachments
        return False

    async def read_content(self, sha256: str) -> bytes | None:  # noqa: ARG002
        return None

    async def flush(self) -> None:
        """Return immediately: there is no pending write."""

    async def close(self) -> None:
        self._is_closed = True


class ForgetfulJournal:
    """The journal of an unrecorded run with possibly millions of facts: refuses stale epochs, stores no facts."""

    def __init__(self, run_id: str) -> None:
        self._fence = EpochFence(run_id)

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:  # noqa: ARG002  as safe as it gets
        self._fence.admit(facts, epoch)

    async def lookup_recorded(self, instance: str) -> Mapping[tuple[str, str], Fact]:  # noqa: ARG002  no instance has facts
        return {}

    async def store_content(self, content: bytes) -> bool:  # noqa: ARG002  tasks keep their attachments
        return False

    async def read_content(self, sha256: str) -> bytes | None:  # noqa: ARG002
        return None

    async def flush(self) -> None:
        """Return immediately: there is no pending write."""

    async def close(self) -> None:
        """Do nothing: no resource is open."""
