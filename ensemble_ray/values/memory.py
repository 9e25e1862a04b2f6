"""Memory entries, scopes and eviction, and the messages between tasks and memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from msgspec import Struct
from pydantic import AfterValidator, Field, Strict, model_validator

from ensemble_ray.errors import ValidationError
from ensemble_ray.values.value import Accepts, Duration, FrozenSequence, Instant, Value, utc_now

if TYPE_CHECKING:
    from ensemble_ray.values.task_output import TaskOutput


AGENT_ROLE, TASK_DESCRIPTION = "agent_role", "task_description"  # metadata of entries of tasks (S-MEM-11)


class MemoryEntry(Value):
    """An entry in memory.

    Attributes:
        content: The text.
        structured_content: The same as an object, such as a task's parsed output; some stores drop it.
        stored_at: Time of its creation, UTC; the current time by default; None: unknown.
        metadata: Texts by name.
        entry_id: Identifies the entry. A store that supports ids contains it once, even if it is stored again; "": no id.
    """

    content: str
    structured_content: Any = None
    stored_at: Instant | None = Field(default_factory=utc_now)
    metadata: Annotated[Mapping[str, str], AfterValidator(dict)] = {}
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
        """Return a value of the metadata; None if it is absent."""
        return self.metadata.get(key)


class EvictionPolicy(ABC):
    """Selects the entries of a scope to keep. Derive your own policy from it; `apply` must be pure."""

    @abstractmethod
    def apply(self, entries: Sequence[MemoryEntry]) -> Sequence[MemoryEntry]:
        """Return the entries to keep; `entries` are in the order in which they were stored."""

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
        """Keep the entries that are younger than a duration.

        Args:
            duration: A `timedelta`, or seconds.
            now: Returns the current time.

        Raises:
            ValidationError: The duration is None, zero or negative.
        """
        return _KeepWithin(_check_duration(duration), now)


@dataclass(frozen=True, slots=True)
class _KeepLast(EvictionPolicy):
    n: int

    def apply(self, entries: Sequence[MemoryEntry]) -> Sequence[MemoryEntry]:
        return entries[-self.n :]


@dataclass(frozen=True, slots=True)
class _KeepWithin(EvictionPolicy):
    duration: timedelta
    now: Callable[[], datetime]

    def apply(self, entries: Sequence[MemoryEntry]) -> Sequence[MemoryEntry]:
        oldest = self.now() - self.duration  # entries of unknown age are evicted
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
        name: Its name in the store.
        keep_last_entries: How many entries it keeps; None: all.
        keep_entries_within: How long it keeps an entry, a `timedelta` or seconds; None: forever.
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
            msg = f"MemoryScope '{name}' has both keep_last_entries and keep_entries_within: give one of them"
            raise ValidationError(msg)
        if isinstance(last, int):
            _check_count(last)
        if isinstance(within, int | float | timedelta):
            _check_duration(within)
        return arguments

    @classmethod
    def of(cls, name: str) -> Self:
        """Return a scope that keeps all entries."""
        return cls(name=name)

    @property
    def policy(self) -> EvictionPolicy | None:
        """Its eviction policy; None: it keeps all entries."""
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
        score: Similarity: the cosine of the angle between the two vectors.
    """

    text: str
    metadata: Mapping[str, str] = {}
    score: float


class MemoryRules(Struct, frozen=True, kw_only=True):
    """The kinds of memory of a run."""

    has_short_term: bool = False
    has_long_term: bool = False
    has_entities: bool = False
    has_store: bool = False
    has_extractor: bool = False  # of entries of long-term memory, from outputs

    @property
    def has_ensemble_memory(self) -> bool:
        return self.has_short_term or self.has_long_term or self.has_entities


class MemoryQuery(Struct, frozen=True, kw_only=True):
    scopes: tuple[str, ...] = ()  # names
    text: str
    uses_ensemble: bool = False


class RecalledMemory(Struct, frozen=True, kw_only=True):
    scopes: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (scope, contents)
    #: (agent's role, description, content); None: no such memory
    short_term: tuple[tuple[str, str, str], ...] | None = None
    long_term: tuple[str, ...] = ()
    entities: tuple[tuple[str, str], ...] = ()  # (name, fact)
    retrieval_s: float | None = None  # None: no search
    lookup_s: float | None = None  # None: no lookup
    embedding_tokens: int = 0


class MemoryNote(Struct, frozen=True, kw_only=True):
    """The entry that a completed task adds to memory."""

    instance: str
    entry_id: str  # unique among all runs
    output: TaskOutput
    scopes: tuple[MemoryScope, ...] = ()
    uses_ensemble: bool = False
    is_stored: bool = False  # in the stores; then only the memory of this run adds it


class RememberedNote(Struct, frozen=True, kw_only=True):
    taken_by: tuple[str, ...] = ()  # `short_term`, `long_term`
    embedding_tokens: int = 0


class ScopeReset(Struct, frozen=True, kw_only=True):
    """The reset of a loop's scopes before an iteration (S-LOOP-91, S-LOOP-93)."""

    loop: str
    mode: Literal["fresh_per_iteration", "window"]
    scopes: tuple[str, ...]
    window_size: int = 0  # entries that `window` keeps


class TaskReflection(Value):
    """Notes on how to improve a task.

    Attributes:
        refined_description: A better description of the task.
        refined_expected_output: A better description of the expected output.
        observations: Observations about the output.
        suggestions: Suggestions for the next run.
        reflected_at: Time of its creation, UTC; the current time by default.
        run_count: How many outputs of the task have reflections so far, including this one; 1 for the first.
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
