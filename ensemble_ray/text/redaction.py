"""Finds personal data and keys in texts, and replaces them by placeholders that are stable within one run.

All patterns are linear in the length of the text. Each repetition has a limit, or consumes what it reads.
"""

from __future__ import annotations

import copy
import hmac
import json
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, lru_cache
from typing import Any, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Struct

Span: TypeAlias = tuple[int, int]  # start and end of a value
Finder: TypeAlias = Callable[[str], Iterable[Span]]
T = TypeVar("T")

#: Not inside a word; an escape of JSON, such as the `\n` before a value, is no word.
_START = r"(?:(?<![\w.-])|(?<=\\[nrtbf])|(?<=\\u[0-9a-fA-F]{4}))"
_END = r"(?![\w-])"

# E-mail addresses.

_AT = re.compile(r"@|%40")
_LOCAL_REVERSED = re.compile(r"[\w.!#$%&'*+/=?^`{|}~-]{1,64}")
_NO_FIRST = ".%&=/?'"  # of a URL or a quotation before the address
_DOMAIN = re.compile(r"(?:[^\W_](?:[\w-]{0,62}[^\W_])?\.){1,8}[^\W\d_]{2,24}")


def find_emails(text: str) -> Iterator[Span]:
    """Yield e-mail addresses, also with `%40` in place of `@`."""
    last = 0
    for at in _AT.finditer(text):
        domain = _DOMAIN.match(text, at.end())
        if domain is None:
            continue
        local = _LOCAL_REVERSED.match(text[max(last, at.start() - 64) : at.start()][::-1])
        if local is None:
            continue
        start = at.start() - local.end()
        cut = max(text.rfind(each, start, at.start()) for each in "=&?/%") + 1 if at.group() == "%40" else start
        start = max(start, cut)
        while start < at.start() and text[start] in _NO_FIRST:
            start += 1
        if start < at.start():
            last = domain.end()
            yield start, last


# Phone numbers.

_PHONE_REST = r"[\d ()/.\u00a0-]{5,24}\d(?!\d)"
_ANY_PHONE = re.compile(rf"{_START}(?!\d\.\d)(?:\+|\(|\d){_PHONE_REST}")
_PREFIXED_PHONE = re.compile(rf"{_START}(?!0\.\d)(?:\+|0|\((?=[+0])){_PHONE_REST}")
_MOST_TRIES = 2  # numbers in a candidate that are checked; the next candidate has the others
_MOST_CUTS, _FEWEST_DIGITS = 5, 7
_NANP_PHONE = re.compile(
    rf"{_START}(?:\+?1[ .-]?)?(?:\(\d{{3}}\)|\d{{3}})[ .-]?\d{{3}}[ .-]?\d{{4}}(?!\d)|{_START}\+{_PHONE_REST}"
)
_FOREIGN_PHONE = re.compile(rf"{_START}(?:\(\+|\+|00(?=[1-9])){_PHONE_REST}")


def find_phones(text: str, region: str | None) -> Iterator[Span]:
    """Yield valid phone numbers: those with a country code, and those of the region."""
    pattern, at = _phone_pattern(region), 0
    while (candidate := pattern.search(text, at)) is not None:
        found = _phone_in(candidate.group(), region)
        if found is None:
            at = candidate.start() + 1
        else:
            yield candidate.start() + found[0], candidate.start() + found[1]
            at = candidate.start() + found[1]


@cache
def _phone_pattern(region: str | None) -> re.Pattern[str]:
    if region is None:
        return _FOREIGN_PHONE
    from phonenumbers import PhoneMetadata

    found = PhoneMetadata.metadata_for_region(region, None)
    if found is not None and found.country_code == 1:
        return _NANP_PHONE
    return _PREFIXED_PHONE if found is not None and found.national_prefix == "0" else _ANY_PHONE


@lru_cache(maxsize=8192)
def _phone_in(candidate: str, region: str | None) -> Span | None:
    """Return the number in a candidate, which may end with groups of digits of something else."""
    for _ in range(_MOST_CUTS):
        if (found := _whole_phone(candidate, region)) is not None:
            return found
        candidate, _, last = candidate.rpartition(" ")
        if not last or sum(map(str.isdigit, candidate)) < _FEWEST_DIGITS:
            break
    return None


def _whole_phone(candidate: str, region: str | None) -> Span | None:
    from phonenumbers import PhoneNumberMatcher

    # Without a region the library reads `+` alone as the mark of a country code.
    is_dialled = region is None and candidate.startswith("00")
    text = f"+{candidate[2:]}" if is_dialled else candidate
    match = next(iter(PhoneNumberMatcher(text, region, max_tries=_MOST_TRIES)), None)
    if match is None:
        return None
    return (0 if is_dialled else match.start, match.end + is_dialled)


# Card numbers and accounts.

_CARD = re.compile(
    rf"{_START}(?:\d{{13,19}}|\d{{4}}([ -])\d{{4}}\1\d{{4}}\1\d{{1,7}}|\d{{4}}([ -])\d{{6}}\2\d{{4,5}}){_END}"
)


def find_cards(text: str) -> Iterator[Span]:
    """Yield numbers of payment cards with a right check digit (Luhn)."""
    from stdnum import luhn

    for match in _CARD.finditer(text):
        digits = match.group().replace(" ", "").replace("-", "")
        if digits[0] in "23456" and luhn.is_valid(digits):
            yield match.span()


_HEAD = 6  # digits of two letters and two check digits
_SHORTEST_IBAN = 15  # characters
_IBAN = re.compile(rf"{_START}[A-Za-z]{{2}}\d{{2}}(?:[ -]?[A-Za-z0-9]){{11,30}}")


def find_ibans(text: str) -> Iterator[Span]:
    """Yield account numbers with a right checksum, with or without spaces."""
    at = 0
    while (candidate := _IBAN.search(text, at)) is not None:
        found = _iban_in(text, *candidate.span())
        at = candidate.start() + 4 if found is None else found
        if found is not None:
            yield candidate.start(), found


def _iban_in(text: str, start: int, longest: int) -> int | None:
    """Return the end of the longest number with a right checksum; a word may follow it."""
    rest, head, found = 0, "", None
    for at in range(start, longest):
        each = text[at]
        if not (each.isascii() and each.isalnum()):
            continue
        digits = str(int(each, 36))
        if len(head) < _HEAD:  # country and check digits count as the last ones
            head += digits
        else:
            rest = int(f"{rest}{digits}") % 97
        is_whole = at + 1 == len(text) or not text[at + 1].isalnum()
        if is_whole and at - start >= _SHORTEST_IBAN - 1 and int(f"{rest}{head}") % 97 == 1:
            found = at + 1
    if found is not None:
        from stdnum import iban

        if iban.is_valid(text[start:found]):
            return found
    return None


# Keys.

_KEY = re.compile(
    rf"""{_START}(?:
    sk-(?:ant-|proj-|or-)?[A-Za-z0-9_-]{{16,300}} | (?:sk|rk|pk|whsec)_(?:live_|test_)?[A-Za-z0-9]{{16,200}}
    | (?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{{16}} | AIza[0-9A-Za-z_-]{{35}} | ya29\.[0-9A-Za-z_-]{{20,500}}
    | gh[pousr]_[A-Za-z0-9]{{20,255}} | github_pat_[A-Za-z0-9_]{{22,255}} | glpat-[A-Za-z0-9_-]{{20,100}}
    | xox[abeoprs]-[A-Za-z0-9-]{{10,255}} | hf_[A-Za-z0-9]{{30,100}} | npm_[A-Za-z0-9]{{36}} | pypi-[A-Za-z0-9_-]{{50,500}}
    | SG\.[A-Za-z0-9_-]{{16,64}}\.[A-Za-z0-9_-]{{16,100}} | gsk_[A-Za-z0-9]{{20,100}} | xai-[A-Za-z0-9]{{20,200}}
    | er[-_][A-Za-z0-9_-]{{24,200}}
    | eyJ[A-Za-z0-9_-]{{8,4096}}\.eyJ[A-Za-z0-9_-]{{4,8192}}\.[A-Za-z0-9_-]{{8,4096}}
    ){_END}""",
    re.VERBOSE,
)
_BEARER = re.compile(r"\b[Bb]earer[ \t]{1,4}(?P<value>[A-Za-z0-9._~+/=-]{8,8192})")
_BLOCK_BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_BLOCK_END = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_BLOCK_REST = re.compile(r"(?:[A-Za-z0-9+/=\s]|\\[nr]|[:,-])*")  # of a block that was cut off


def find_keys(text: str) -> Iterator[Span]:
    """Yield keys of well-known forms, bearer tokens and private key blocks."""
    for match in _KEY.finditer(text):
        yield match.span()
    if "earer" in text:
        for match in _BEARER.finditer(text):
            yield match.span("value")
    if "PRIVATE KEY" in text:
        ends = [match.end() for match in _BLOCK_END.finditer(text)]
        past = number = 0
        for begin in _BLOCK_BEGIN.finditer(text):
            if begin.start() < past:
                continue
            while number < len(ends) and ends[number] <= begin.end():
                number += 1
            rest = _BLOCK_REST.match(text, begin.end())
            past = ends[number] if number < len(ends) else begin.end() if rest is None else rest.end()
            yield begin.start(), past


PATTERNS = ("email", "phone", "card", "iban", "key")
#: Patterns that need a package of the extra.
NEEDS: Mapping[str, str] = {"phone": "phonenumbers", "card": "stdnum", "iban": "stdnum"}


def finder_of(pattern: str, region: str | None) -> Finder:
    match pattern:
        case "email":
            return find_emails
        case "phone":
            return lambda text: find_phones(text, region)
        case "card":
            return find_cards
        case "iban":
            return find_ibans
        case _:
            return find_keys


def finder_of_expression(expression: str) -> Finder:
    """Find the first group of an expression, or all that it matches if it has no group."""
    expressed = re.compile(expression)
    group = 1 if expressed.groups else 0
    return lambda text: (match.span(group) for match in expressed.finditer(text) if match.start(group) >= 0)


# One run.

_DIGITS = 12  # 48 bits: among a million values, two are the same with a probability of 0.2 %
_MOST_ROUNDS = 4
_MOST_SEEN, _MOST_SEEN_CHARACTERS = 2048, 4_000_000
_MOST_VALUES = 50_000  # in memory; the record has all values of a reversible run
_SHORTEST = 5  # characters of a value of the library's patterns
WITHHELD = "[text withheld: a pattern of the redactor failed]"


class Redaction:
    """The redactor of one run. It travels to all processes of the run; only packed callables can be pickled."""

    def __init__(
        self,
        *,
        secret: bytes,
        salt: str,
        patterns: Sequence[str] = PATTERNS,
        expressions: Mapping[str, str] | None = None,
        region: str | None = None,
        callables: Mapping[str, Finder] | None = None,
        packed: bytes | None = None,
        seal: bytes | None = None,
        tools: Sequence[str] | None = None,
        reveal_roles: Sequence[str] = (),
        key: str = "",
        values: Mapping[str, str] | None = None,
        fresh: Sequence[str] = (),
        most_values: int | None = _MOST_VALUES,
    ) -> None:
        """`seal` is a key of Fernet; None: the values cannot be read again. `tools` see values; None: all tools."""
        self._secret = secret
        self.salt = salt
        self.patterns = tuple(patterns)
        self.expressions = dict(expressions or {})
        self.region = region
        self.callables = dict(callables or {})
        self._packed = packed
        self._seal = seal
        self.tools = None if tools is None else tuple(tools)
        self.reveal_roles = tuple(reveal_roles)
        self.key = key  # name of the environment variable; "": the usual one
        self._finders: dict[str, Finder] = {each: finder_of(each, region) for each in self.patterns}
        self._finders |= {name: finder_of_expression(each) for name, each in self.expressions.items()}
        self._finders |= self.callables
        kinds = "|".join(sorted(map(re.escape, map(str.upper, self._kinds()))))
        mark = re.compile(rf"\[(?:{kinds})_[0-9a-f]{{{_DIGITS}}}\]")
        name = re.compile(rf"\[((?:{kinds})_[0-9a-f]{{{_DIGITS}}})\]|\b((?:{kinds})_[0-9a-f]{{{_DIGITS}}})\b")
        self._mark, self._name = mark, name
        self._shortest = 1 if self.expressions or self.callables or packed else _SHORTEST
        self._seen: dict[str, str] = {}
        self._seen_characters = 0
        self._values: OrderedDict[str, str] = OrderedDict(values or {})
        self._known = set(self._values)  # with those that are recorded
        self._most_values = most_values  # None: all, for a reader of the record
        self._fresh = list(fresh)  # values to be recorded
        self.failure = ""  # of a callable, for a warning

    def _kinds(self) -> list[str]:
        return [*self._finders, *(cast("list[str]", pickle.loads(self._packed)[0]) if self._packed else ())]  # noqa: S301  our own bytes

    def __repr__(self) -> str:
        return f"Redaction({', '.join(self._finders)})"

    def __reduce__(self) -> tuple[Callable[[Mapping[str, Any]], Redaction], tuple[Mapping[str, Any]]]:
        if self.callables:
            raise TypeError("the callables of a redactor must be packed before they are pickled")
        data = {
            "secret": self._secret, "salt": self.salt, "patterns": self.patterns, "expressions": self.expressions,
            "region": self.region, "packed": self._packed, "seal": self._seal, "tools": self.tools, "reveal_roles": self.reveal_roles, "key": self.key,
            "values": dict(self._values), "fresh": self._fresh,
        }  # fmt: skip
        return _of_data, (data,)

    def pack(self, dump: Callable[[object, str], bytes]) -> Redaction:
        """Return it with its callables as bytes. `dump` receives the callables, and a name for errors."""
        packed = self._packed
        if self.callables:
            packed = pickle.dumps(([*self.callables], dump(self.callables, "The redactor's callables")))
        return Redaction(
            secret=self._secret, salt=self.salt, patterns=self.patterns, expressions=self.expressions, region=self.region,
            packed=packed, seal=self._seal, tools=self.tools, reveal_roles=self.reveal_roles, key=self.key, values=self._values, fresh=self._fresh,
        )  # fmt: skip

    def load(self) -> None:
        """Load the packed callables, in a process that may run the user's code."""
        if self._packed is not None:
            _, body = pickle.loads(self._packed)  # noqa: S301  bytes of our own driver
            self.callables = pickle.loads(body)  # noqa: S301
            self._finders |= self.callables
            self._packed = None
            self._seen.clear()

    @property
    def is_reversible(self) -> bool:
        return self._seal is not None

    @property
    def check(self) -> str:
        """A mark of the secret, to recognize a wrong key."""
        return hmac.digest(self._secret, b"check", "sha256").hex()[:16]

    @property
    def holds_stream(self) -> bool:
        """Whether a streamed answer must be complete before a piece of it is sent."""
        return bool(self.expressions or self.callables or self._packed)

    # Texts.

    def clean(self, text: str) -> str:
        """Return the text with placeholders in place of values; the same text if there are none."""
        if len(text) < self._shortest:
            return text
        known = self._seen.get(text)
        if known is None:
            known = self._replace(text)
            self._seen_characters += len(text)
            if len(self._seen) >= _MOST_SEEN or self._seen_characters > _MOST_SEEN_CHARACTERS:
                self._seen.clear()
                self._seen_characters = len(text)
            self._seen[text] = known
        return known

    def find(self, text: str) -> list[tuple[int, int, str]]:
        """Return (start, end, kind) of the values, in order and without overlaps. A failing callable is an error."""
        found: list[tuple[int, int, str]] = []
        for kind, finder in self._finders.items():
            try:
                found += [(*_checked(span, len(text)), kind) for span in finder(text)]
            except Exception as error:  # noqa: BLE001  user code, and spans of any type
                raise FinderError(f"the pattern '{kind}' raised {type(error).__name__}") from None
        if not found:
            return found
        found = [(_unescaped(text, start), end, kind) for start, end, kind in found]
        found.sort(key=lambda each: (each[0], -each[1]))
        merged: list[tuple[int, int, str]] = []
        marks = [match.span() for match in self._mark.finditer(text)] if "[" in text else []
        for start, end, kind in found:
            for first, last in _without(start, end, marks):
                if merged and first < merged[-1][1]:
                    before = merged[-1]
                    merged[-1] = (before[0], max(before[1], last), before[2])
                elif last > first:
                    merged.append((first, last, kind))
        return merged

    def _replace(self, text: str, rounds: int = _MOST_ROUNDS) -> str:
        try:
            found = self.find(text)
        except FinderError as error:  # without it, the text may contain anything
            self.failure = str(error)
            return WITHHELD
        if not found:
            return text
        parts: list[str] = []
        at = 0
        for start, end, kind in found:
            parts += [text[at:start], self.placeholder(kind, text[start:end])]
            at = end
        replaced = "".join([*parts, text[at:]])
        # A value may be found only when its neighbour is gone.
        return self._replace(replaced, rounds - 1) if rounds else replaced

    def placeholder(self, kind: str, value: str) -> str:
        """Return the placeholder of a value, and remember both."""
        mac = hmac.digest(self._secret, f"{kind}\0{value}".encode("utf-8", "surrogatepass"), "sha256").hex()
        name = f"{kind.upper()}_{mac[:_DIGITS]}"
        self._keep(name, value)
        if name not in self._known:
            self._known.add(name)
            if self.is_reversible:
                self._fresh.append(name)
        return f"[{name}]"

    def _keep(self, name: str, value: str) -> None:
        self._values[name] = value
        if (
            self._most_values is not None
            and len(self._values) > self._most_values
            and next(iter(self._values)) not in self._fresh
        ):
            old, _ = self._values.popitem(last=False)
            if not self.is_reversible:
                self._known.discard(old)

    def restore(self, text: str) -> str:
        """Return the text with the values that this process knows. A model may leave out the brackets."""
        if "_" not in text:
            return text
        return self._name.sub(lambda match: self._values.get(match[1] or match[2], match[0]), text)

    def unknown_in(self, text: str) -> list[str]:
        """Return the names of placeholders that this process cannot restore."""
        if "_" not in text:
            return []
        names = (match[1] or match[2] for match in self._name.finditer(text))
        return [each for each in dict.fromkeys(names) if each not in self._values]

    def names_in(self, text: str) -> list[str]:
        return [match[1] or match[2] for match in self._name.finditer(text)]

    # Values in the record.

    @property
    def values(self) -> Mapping[str, str]:
        """The known values by their placeholders."""
        return {f"[{name}]": value for name, value in self._values.items()}

    def seal(self, name: str) -> str:
        """Return the encrypted value of a placeholder's name."""
        token: bytes = self._cipher().encrypt(self._values[name].encode("utf-8", "surrogatepass"))
        return token.decode()

    def learn(self, name: str, token: str) -> None:
        """Accept an encrypted value of the record. A `ValueError`: the key is wrong, or the value is damaged."""
        from cryptography.fernet import InvalidToken

        try:
            value = self._cipher().decrypt(token.encode()).decode("utf-8", "surrogatepass")
        except InvalidToken:
            raise ValueError(f"the value of {name} cannot be decrypted with this key") from None
        self._known.add(name)
        self._keep(name, value)

    def take_fresh(self) -> list[tuple[str, str]]:
        """Return the new (name, encrypted value) since the last call, to be recorded."""
        if not self._fresh:
            return []
        fresh, self._fresh = self._fresh, []
        return [(name, self.seal(name)) for name in fresh]

    def sealed_values(self) -> dict[str, str]:
        """Return all known values, encrypted, for the first fact of a run."""
        return {name: self.seal(name) for name in self._values}

    def _cipher(self) -> Any:
        from cryptography.fernet import Fernet

        if self._seal is None:
            raise ValueError("the run is not reversible")
        return Fernet(self._seal)

    # Data.

    def clean_json(self, text: str) -> str:
        """Clean a JSON text, also values that it writes with escapes. Other texts are cleaned as they are."""
        if "\\" in text:
            try:
                read: object = json.loads(text)
            except (ValueError, RecursionError):
                return self.clean(text)
            cleaned = self.clean_data(read)
            return text if cleaned is read else json.dumps(cleaned, ensure_ascii=False)
        return self.clean(text)

    def clean_data(self, value: T) -> T:
        """Return the value with all its texts cleaned, or the value itself if they are clean.

        It reads mappings, sequences, structs, dataclasses and pydantic models, and validates nothing again.
        """
        return cast("T", map_texts(value, self.clean))

    def holds_value(self, text: str) -> bool:
        """Whether the text contains a value, or its finder failed."""
        try:
            return bool(self.find(text))
        except FinderError:
            return True

    def restore_json(self, text: str) -> str:
        """Restore the strings of a JSON text, so that it stays JSON."""
        try:
            read: object = json.loads(text)
        except (ValueError, RecursionError):
            return self.restore(text)
        restored = map_texts(read, self.restore)
        return text if restored is read else json.dumps(restored, ensure_ascii=False)


class FinderError(Exception):
    """A user's pattern failed."""


def _of_data(data: Mapping[str, Any]) -> Redaction:  # submissions contain its name
    return Redaction(**data)


def _checked(span: object, length: int) -> Span:
    start, end = cast("tuple[object, object]", span)
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start <= end <= length):
        raise ValueError("not a span of the text")
    return start, end


def _unescaped(text: str, start: int) -> int:
    r"""Return the start of a value behind an escape of JSON that it begins with, such as the `n` of `\n`."""
    at = start
    while at and text[at - 1] == "\\":
        at -= 1
    if (start - at) % 2 == 0 or start >= len(text):
        return start
    return start + (5 if text[start] == "u" else 1)


def _without(start: int, end: int, marks: Sequence[Span]) -> Iterator[Span]:
    """Yield the parts of a span outside of placeholders."""
    for first, last in marks:
        if last <= start or first >= end:
            continue
        if first > start:
            yield start, first
        start = last
    if start < end:
        yield start, end


#: Fields of the library's own classes that name things, and contain no text of others.
_NAMES = frozenset(
    {
        "run", "run_id", "name", "instance", "key", "kind", "type", "id", "tool_call_id", "review_id", "gate_id", "seq", "epoch",
        "request_digest", "reuse_digest", "reused", "digest", "digests", "sha256", "origin", "ensemble_id", "traceparent",
        "redaction", "token", "plan", "forked_from", "agent_role", "agent_key", "tool_name", "model", "provider", "effect", "outcome",
        "worker", "worker_role", "charged", "media_type", "entry_id", "batch", "file", "provider_batch", "endpoint", "idempotency_key",
        "error_type", "trace_id", "span_id", "tracing", "workflow", "unit", "exit_reason", "delegation_id", "ended_at", "verdict",
        "agents", "inputs_digest", "estimated_tokens", "metrics", "finish_reason", "call_ids",
    }
)  # fmt: skip
_OWN = "ensemble_ray."


def map_texts(value: object, change: Callable[[str], str], *, has_keys: bool = True) -> object:
    """Return a copy of the value with changed texts, or the value itself if no text changed.

    Keys of mappings are texts if `has_keys`.
    """
    if isinstance(value, str):
        return value if isinstance(value, Enum) else change(value)
    if value is None or isinstance(value, int | float | bytes | type):
        return value
    if isinstance(value, dict):
        return _map_dict(cast("dict[object, object]", value), change, has_keys)
    if isinstance(value, list | tuple):
        return _map_sequence(cast("Sequence[object]", value), change, has_keys)
    if isinstance(value, set | frozenset):
        members = cast("Iterable[object]", value)
        changed = [map_texts(each, change, has_keys=has_keys) for each in members]
        is_same = all(one is other for one, other in zip(changed, members, strict=True))
        return value if is_same else type(value)(changed)
    if isinstance(value, Struct):
        return _map_fields(value, type(value).__struct_fields__, change, has_keys, msgspec.structs.force_setattr)
    if (names := getattr(type(value), "__pydantic_fields__", None)) is not None:
        more = getattr(value, "__pydantic_extra__", None)
        changes = _changes_of(value, [*names, *(more or ())], change, has_keys)
        return value if not changes else cast("Any", value).model_copy(update=changes)
    if is_dataclass(value):
        return _map_fields(value, [each.name for each in fields_of(value)], change, has_keys, object.__setattr__)
    if isinstance(value, Mapping):
        mapping = cast("Mapping[object, object]", value)
        copied = dict(mapping)
        changed_mapping = _map_dict(copied, change, has_keys)
        return value if changed_mapping is copied else changed_mapping
    return value


def _map_dict(value: dict[object, object], change: Callable[[str], str], has_keys: bool) -> dict[object, object]:  # noqa: FBT001
    changed = {
        (change(key) if has_keys and isinstance(key, str) and not isinstance(key, Enum) else key): map_texts(
            each, change, has_keys=has_keys
        )
        for key, each in value.items()
    }
    is_same = len(changed) == len(value) and all(changed.get(key, ...) is each for key, each in value.items())
    return value if is_same else changed


def _map_sequence(value: Sequence[object], change: Callable[[str], str], has_keys: bool) -> Sequence[object]:  # noqa: FBT001
    changed = [map_texts(each, change, has_keys=has_keys) for each in value]
    if all(one is other for one, other in zip(changed, value, strict=True)):
        return value
    if not isinstance(value, tuple):
        return changed
    make = getattr(type(value), "_make", tuple)
    return cast("Sequence[object]", make(changed))


def _changes_of(
    value: object,
    names: Iterable[str],
    change: Callable[[str], str],
    has_keys: bool,  # noqa: FBT001
) -> dict[str, object]:
    skipped = _NAMES if type(value).__module__.startswith(_OWN) else frozenset[str]()
    changes: dict[str, object] = {}
    for name in names:
        if name in skipped:
            continue
        try:
            each = getattr(value, name)
        except AttributeError:  # not set
            continue
        changed = map_texts(each, change, has_keys=has_keys)
        if changed is not each:
            changes[name] = changed
    return changes


def _map_fields(
    value: object,
    names: Iterable[str],
    change: Callable[[str], str],
    has_keys: bool,  # noqa: FBT001
    assign: Callable[[Any, str, object], None],
) -> object:
    changes = _changes_of(value, names, change, has_keys)
    if not changes:
        return value
    changed = copy.copy(value)
    for name, each in changes.items():
        assign(changed, name, each)
    return changed


# Streams.

_CONTEXT = 160  # characters before a piece that decide whether it contains a value
_HELD = 160  # characters that may begin a value; longer values have no white space, or are key blocks


class StreamRedaction:
    """Cleans a streamed text. It sends whole words, and holds back what may be the begin of a value."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction
        self._context = ""  # sent already
        self._text = ""

    def feed(self, piece: str) -> str:
        """Return the cleaned text that is safe to send, perhaps empty."""
        self._text += piece
        if self._redaction.holds_stream or len(self._text) <= _HELD:
            return ""
        cut = self._cut()
        return "" if cut <= 0 else self._send(cut)

    def finish(self) -> str:
        """Return the rest."""
        return self._send(len(self._text)) if self._text else ""

    def _cut(self) -> int:
        whole, offset = self._context + self._text, len(self._context)
        limit = len(whole) - _HELD
        if (begin := whole.rfind("-----BEGIN ")) >= 0 and "-----END " not in whole[begin:]:
            limit = min(limit, begin)
        cut = max(whole.rfind(each, offset, max(offset, limit)) for each in " \n\t") + 1
        for start, end, _ in reversed(self._redaction.find(whole)):
            if start < cut < end:
                cut = start
        return cut - offset

    def _send(self, cut: int) -> str:
        """Clean the text up to `cut`, as the whole text would be cleaned."""
        whole, offset = self._context + self._text, len(self._context)
        last = offset + cut
        try:
            found = self._redaction.find(whole)
        except FinderError as error:
            self._redaction.failure = str(error)
            self._text = ""
            return WITHHELD
        parts: list[str] = []
        at = offset
        for start, end, kind in found:
            if offset <= start and end <= last:
                parts += [whole[at:start], self._redaction.placeholder(kind, whole[start:end])]
                at = end
        parts.append(whole[at:last])
        self._context, self._text = whole[max(0, last - _CONTEXT) : last], whole[last:]
        return self._redaction.clean("".join(parts))
