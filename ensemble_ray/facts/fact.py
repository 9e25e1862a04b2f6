"""The base classes of facts and their encoding. Each kind is a subclass of `FactData`, and its `KEYS` define the format.

A rewritten fact is unchanged: `absent` names keys that an earlier version lacks, `rest` has those of a later version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Generic, NamedTuple, Self, cast, dataclass_transform

import msgspec
from msgspec import Struct, StructMeta
from typing_extensions import TypeVar

from ensemble_ray.errors import RecordError
from ensemble_ray.values.ids import RUN

#: Instants from about the year 70 to 9500, and durations of up to 300 years, s: within the range of `datetime`.
_FIRST_S, _LAST_S, _LONGEST_S = -6e10, 2.4e11, 1e10

Check = Callable[[object], str | None]  # Returns a description of the required value, or None if the value is valid.


def type_of(what: str, *types: type) -> Check:
    """Return a check for these types; a bool is not a number."""

    def check(value: object) -> str | None:
        is_right = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        return None if is_right else what

    return check


def optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def list_of(each: Check) -> Check:
    """Return a check for lists of such values."""

    def check(value: object) -> str | None:
        if not isinstance(value, list | tuple):
            return "a list"
        wrong = (problem for one in cast("list[object]", value) if (problem := each(one)) is not None)
        found = next(wrong, None)
        return None if found is None else f"a list of which each is {found}"

    return check


def object_of(**fields: Check) -> Check:
    def check(value: object) -> str | None:
        if not isinstance(value, Mapping):
            return "an object"
        data = cast("Mapping[str, object]", value)
        for name, each in fields.items():
            if (problem := each(data.get(name))) is not None:
                return f"an object whose {name} is {problem}"
        return None

    return check


def one_of(*values: str) -> Check:
    return lambda value: None if value in values else f"one of {', '.join(values)}"


def _within(what: str, least: float, most: float) -> Check:
    def check(value: object) -> str | None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if is_number and least <= cast("float", value) <= most else what

    return check


def require(name: str, value: object, check: Check) -> None:
    """Raise a `ValueError` that names the value and the required one, unless the check accepts it."""
    if (problem := check(value)) is not None:
        raise ValueError(f"its {name} is not {problem}")


def is_true(value: object) -> bool:
    return value is True


TEXT, NUMBER, FLAG = type_of("a text", str), type_of("a whole number", int), type_of("true or false", bool)
OBJECT, INSTANT = type_of("an object", Mapping), _within("an instant", _FIRST_S, _LAST_S)
DURATION = _within("a duration", -_LONGEST_S, _LONGEST_S)


def ANY(_value: object) -> None:  # noqa: N802  one of the checks above
    """Accept every value."""


_ABSENT: Final = object()
TIME_OF_FACT: Final = object()  # As a default: the time of the fact.


class Key(Struct, frozen=True):
    """The encoding of one field. A value of another type is damage: reading it fails."""

    check: Check
    default: object  # replaces a missing value
    is_optional: bool  # whether the default is not written
    is_needed: bool
    read: Callable[[Any], object] | None
    write: Callable[[Any], object] | None


class _Written(NamedTuple):
    key: Key
    default: object


def written(
    check: Check,
    *,
    missing: object = _ABSENT,
    is_needed: bool = False,
    read: Callable[[Any], object] | None = None,
    write: Callable[[Any], object] | None = None,
    default: object = msgspec.NODEFAULT,
    default_factory: Callable[[], object] | None = None,
) -> Any:
    """Return a field of a kind of facts with its encoding; see `Key`.

    Without `missing`, the key is optional: the default of the field is not written. An effect without a key that
    `is_needed` cannot be reused. `read` and `write` convert between field and JSON value.
    """
    is_optional = missing is _ABSENT
    key = Key(check, default if is_optional else missing, is_optional, is_needed, read, write)
    return _Written(key, default if default_factory is None else msgspec.field(default_factory=default_factory))


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(written,))
class FactKind(StructMeta):
    """Creates kinds of facts. Their fields by `written` are in written order."""

    def __new__(  # noqa: PYI034  mypy refuses `Self` in a metaclass
        mcls, name: str, bases: tuple[type, ...], namespace: dict[str, object], *, kw_only: bool = True
    ) -> FactKind:
        found = {field: value for field, value in namespace.items() if isinstance(value, _Written)}
        if found:
            namespace["KEYS"] = {field: each.key for field, each in found.items()}
        for field, each in found.items():
            namespace[field] = each.default
            if each.default is msgspec.NODEFAULT:
                del namespace[field]
        return super().__new__(mcls, name, bases, namespace, frozen=True, kw_only=kw_only)


class FactData(Struct, metaclass=FactKind):
    """The content of a fact: JSON data, or frozen values that the journal renders as JSON. A subclass is a kind of facts."""

    KIND: ClassVar[str] = ""
    KEYS: ClassVar[Mapping[str, Key]] = {}  # in written order; keys, values and order of written facts must not change
    IS_EFFECT: ClassVar[bool] = False  # whether facts are named `instance/turn/call`
    IS_OF_RUN: ClassVar[bool] = False  # whether it only describes runs as a whole
    FENCE: ClassVar[str] = ""  # instance with the epoch that decides about refusal; empty: the fact's instance

    absent: tuple[str, ...] = ()  # keys that the recorded fact lacks
    rest: Mapping[str, object] | None = None

    @property
    def kind(self) -> str:
        return self.KIND

    def to_data(self) -> dict[str, object]:
        data: dict[str, object] = {}
        for name, key in self.KEYS.items():
            value = getattr(self, name)
            if key.is_optional and value == key.default:
                continue
            data[name] = value if key.write is None else key.write(value)
        for name in self.absent:
            data.pop(name, None)
        if self.rest:
            data.update(self.rest)
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, object], at: float) -> Self:
        """Decode the result of `to_data`, also after a JSON round trip; see `require`."""
        values: dict[str, Any] = {}
        absent: list[str] = []
        for name, key in cls.KEYS.items():
            value = data.get(name, _ABSENT)
            if value is _ABSENT:
                values[name] = at if key.default is TIME_OF_FACT else key.default
                if not key.is_optional:
                    absent.append(name)
                continue
            require(name, value, key.check)
            values[name] = value if key.read is None else key.read(value)
        rest = None
        if not data.keys() <= cls.KEYS.keys():
            rest = {name: value for name, value in data.items() if name not in cls.KEYS}
        return cls(**values, absent=tuple(absent), rest=rest)


D_co = TypeVar("D_co", bound=FactData, covariant=True, default=FactData)
W = TypeVar("W", bound=FactData)


class Fact(Struct, Generic[D_co], frozen=True, kw_only=True):
    """A stimulus or an effect with its name, as stored by the journal."""

    run: str
    name: str  # `run`, or a stimulus or effect: `facts#0`, `facts#0/0/model`, `facts#0/0/call-1`
    at: float  # Unix time, s
    data: D_co
    epoch: int = 0  # re-dispatch generation of its instance; facts of an older one are refused
    seq: int = 0  # position in the record; 0 until a journal assigns one

    @property
    def kind(self) -> str:
        return self.data.kind

    @property
    def instance(self) -> str:
        """Its instance; `run` for facts of the run itself."""
        return self.name.rsplit("/", 2)[0] if self.data.IS_EFFECT else self.name

    @property
    def is_of_run(self) -> bool:
        return self.instance == RUN

    @property
    def fence(self) -> str:
        """The instance with the epoch that decides whether the fact is refused."""
        return self.data.FENCE or self.instance


def find_fact(facts: Mapping[tuple[str, str], Fact], name: str, wanted: type[W]) -> Fact[W] | None:
    return cast("Fact[W] | None", facts.get((name, wanted.KIND)))


def kinds_of(*wanted: type[FactData]) -> tuple[str, ...]:
    return tuple(each.KIND for each in wanted)


def require_usable(fact: Fact[W]) -> Fact[W]:
    """Return a recorded effect if it can be reused."""
    keys = fact.data.KEYS
    missing = [name for name in fact.data.absent if name not in keys or keys[name].is_needed]
    if missing:
        raise RecordError(
            f"The record is damaged: fact {fact.seq} of run '{fact.run}' ({fact.kind} '{fact.name}') has no {', '.join(missing)}"
        )
    return fact


def as_mapping(value: object) -> Mapping[str, object]:
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def as_sequence(value: object) -> Sequence[object]:
    return cast("Sequence[object]", value) if isinstance(value, list | tuple) else ()


def as_count(value: object) -> int:
    return value if isinstance(value, int) else 0


def as_text(value: object, default: str = "") -> str:
    return value if isinstance(value, str) else default
