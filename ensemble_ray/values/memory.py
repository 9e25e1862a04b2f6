"""What memory is made of: entries, scopes, rules of eviction; what a task asks of memory and what it is answered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, Field, Strict, model_validator

from ensemble_ray.errors import ValidationError
from ensemble_ray.values.value import Duration, FrozenSequence, Instant, Value, utc_now

if TYPE_CHECKING:
    from ensemble_ray.values.task_output import TaskOutput
    from ensemble_ray.values.value import Accepts


#: Metadata of the entries that tasks write (S-MEM-11).
AGENT_ROLE, TASK_DESCRIPTION = "agent_role", "task_description"


def _copy(value: Mapping[str, str]) -> Mapping[str, str]:
    return dict(value)


class MemoryEntry(Value):
    """One thing that is remembered.

    Attributes:
        content: The text.
        structured_content: The same as an object, such as a task's parsed output; not every store keeps it.
        stored_at: When it came to be, UTC; now where nothing is said; None: nobody knows.
        metadata: Texts by name.
        entry_id: Names the entry, so that a store that keeps ids has it once, however often it is stored; "": none.
    """

    content: str
    structured_content: Any = None
    stored_at: Instant | None = Field(default_factory=utc_now)
    metadata: Annotated[Mapping[str, str], AfterValidator(_copy)] = {}
    entry_id: str = ""

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        if cast("Mapping[str, Any]", data).get("content") is None:
            raise ValidationError("MemoryEntry content must not be None")
        return cast("object", data)

    def get_meta(self, key: str) -> str | None:
        """Return what the metadata has under that name; None where it has nothing."""
        return self.metadata.get(key)


class EvictionPolicy(ABC):
    """Says which entries of a scope are kept. Derive from it for one of your own; it must be pure."""

    @abstractmethod
    def apply(self, entries: Sequence[MemoryEntry]) -> Sequence[MemoryEntry]:
        """Return the entries that are kept, of these, which are in the order in which they were stored."""

    @staticmethod
    def keep_last_entries(n: int) -> EvictionPolicy:
        """Keep the last `n` entries.

        Raises:
            ValidationError: `n` is 0 or less.
        """
        return _KeepLast(_check_count(n))

    @staticmethod
    def keep_entries_within(
        duration: timedelta | float | None, *, now: Callable[[], datetime] = utc_now
    ) -> EvictionPolicy:
        """Keep what was stored less than that long ago.

        Args:
            duration: A `timedelta`, or seconds.
            now: Tells the time.

        Raises:
            ValidationError: the duration is None, zero or negative.
        """
        return _KeepWithin(_check_duration(duration), now)


@dataclass(frozen=True, slots=True)
class _KeepLast(EvictionPolicy):
    n: int

    def apply(self, entries: Sequence[MemoryEntry]) -> Sequence[MemoryEntry]:
        """Return the last ones."""
        return entries[-self.n :]


@dataclass(frozen=True, slots=True)
class _KeepWithin(EvictionPolicy):
    duration: timedelta
    now: Callable[[], datetime]

    def apply(self, entries: Sequence[MemoryEntry]) -> Sequence[MemoryEntry]:
        """Return those that are young enough; entries of which nobody knows the age are not."""
        oldest = self.now() - self.duration
        return [entry for entry in entries if entry.stored_at is not None and entry.stored_at > oldest]


def _check_count(n: int) -> int:
    if n <= 0:
        raise ValidationError(f"keep_last_entries n must be > 0, got: {n}")
    return n


def _check_duration(duration: timedelta | float | None) -> timedelta:
    if duration is None:
        raise ValidationError("keep_entries_within duration must not be None")
    length = duration if isinstance(duration, timedelta) else timedelta(seconds=duration)
    if length <= timedelta():
        raise ValidationError(f"keep_entries_within duration must be positive, got: {length}")
    return length


if TYPE_CHECKING:
    _OptionalDuration = Accepts[timedelta | None, timedelta | float | None]
else:
    _OptionalDuration = Duration | None


class MemoryScope(Value):
    """A part of a memory store that a task reads and writes.

    Attributes:
        name: Names it in the store.
        keep_last_entries: How many entries it keeps; None: all.
        keep_entries_within: How long it keeps an entry, a `timedelta` or seconds; None: for ever.
    """

    name: Annotated[str, Strict()] = Field(kw_only=False)
    keep_last_entries: Annotated[int, Strict()] | None = None
    keep_entries_within: _OptionalDuration = cast("Any", None)

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        arguments = cast("Mapping[str, Any]", data)
        name, last, within = (arguments.get(key) for key in ("name", "keep_last_entries", "keep_entries_within"))
        if name is None or (isinstance(name, str) and not name.strip()):
            raise ValidationError("MemoryScope name must not be None or blank")
        if last is not None and within is not None:
            raise ValidationError(
                f"MemoryScope '{name}' has both keep_last_entries and keep_entries_within: give one of them"
            )
        if isinstance(last, int):
            _check_count(last)
        if isinstance(within, int | float | timedelta):
            _check_duration(within)
        return arguments

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the scope of that name, which keeps everything."""
        return cls(name=name)

    @property
    def policy(self) -> EvictionPolicy | None:
        """Which entries it keeps; None: all."""
        if self.keep_last_entries is not None:
            return EvictionPolicy.keep_last_entries(self.keep_last_entries)
        within = self.keep_entries_within
        return None if within is None else EvictionPolicy.keep_entries_within(within)

    def to_data(self) -> dict[str, object]:
        """Return it as JSON-able data."""
        within = self.keep_entries_within
        limits = {
            "keep_last_entries": self.keep_last_entries,
            "keep_entries_within": None if within is None else within.total_seconds(),
        }
        return {"name": self.name, **{key: value for key, value in limits.items() if value is not None}}


class EmbeddingMatch(Value):
    """A text that an embedding store found.

    Attributes:
        text: As it was added.
        metadata: As it was added.
        score: How near it is: the cosine of the angle between the two vectors.
    """

    text: str
    metadata: Mapping[str, str] = {}
    score: float


# What tasks ask of the memory of their run.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRules:
    """Which kinds of memory a run has; travels to every process."""

    has_short_term: bool = False
    has_long_term: bool = False
    has_entities: bool = False
    has_store: bool = False
    #: whether what long-term memory stores is asked of user code, with the whole output
    has_extractor: bool = False

    @property
    def has_ensemble_memory(self) -> bool:
        """Whether there is memory that every task uses."""
        return self.has_short_term or self.has_long_term or self.has_entities


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuery:
    """What a task wants to be reminded of before its prompt is built."""

    #: names of scopes, in the order of their sections
    scopes: tuple[str, ...] = ()
    #: the task's description
    text: str
    #: whether the memory of the ensemble is asked too
    uses_ensemble: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecalledMemory:
    """What a task was reminded of."""

    #: (scope, contents), of all scopes that were asked
    scopes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    #: (agent's role, description, content) in recording order; None: there is no short-term memory
    short_term: tuple[tuple[str, str, str], ...] | None = None
    long_term: tuple[str, ...] = ()
    #: (name, fact) in order of first put
    entities: tuple[tuple[str, str], ...] = ()
    #: how long long-term memory took, s; None: it was not asked
    retrieval_s: float | None = None
    #: how long the entities took, s; None: they were not asked
    lookup_s: float | None = None
    #: tokens that an endpoint read to find it
    embedding_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNote:
    """What a completed task leaves in memory."""

    #: of the task
    instance: str
    #: names what is written, over all runs
    entry_id: str
    output: TaskOutput
    scopes: tuple[MemoryScope, ...] = ()
    #: whether the memory of the ensemble takes it too
    uses_ensemble: bool = False
    #: whether it stands in the stores already; then the notes of this run alone take it
    is_stored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedNote:
    """What became of a note."""

    #: memories of the ensemble that took it: `short_term`, `long_term`
    taken_by: tuple[str, ...] = ()
    #: tokens that an endpoint read to store it
    embedding_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeReset:
    """What a loop does with the scopes of its body before an iteration (S-LOOP-91, S-LOOP-93)."""

    loop: str
    mode: Literal["fresh_per_iteration", "window"]
    scopes: tuple[str, ...]
    #: of `window`: how many entries are kept
    window_size: int = 0


class TaskReflection(Value):
    """Notes on how to do a task better next time.

    Attributes:
        refined_description: How the task could be described better.
        refined_expected_output: How what is wanted could be described better.
        observations: What was noticed about the output.
        suggestions: What to try next time.
        reflected_at: When it was made, UTC; now where nothing is said.
        run_count: How many outputs of the task were reflected on so far, this one included; 1 for the first.
    """

    refined_description: str
    refined_expected_output: str
    observations: FrozenSequence[str] = ()
    suggestions: FrozenSequence[str] = ()
    reflected_at: Instant = Field(default_factory=utc_now)
    run_count: Annotated[int, Strict()] = 1

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        arguments = cast("Mapping[str, Any]", data)
        for name in ("refined_description", "refined_expected_output"):
            if arguments.get(name) is None:
                raise ValidationError(f"TaskReflection {name} must not be None")
        count = arguments.get("run_count", 1)
        if isinstance(count, int) and count < 1:
            raise ValidationError(f"run_count must be >= 1, was: {count}")
        return arguments

    def to_data(self) -> dict[str, object]:
        """Return it as JSON-able data."""
        return self.model_dump(mode="json")
