"""Parse an answer as the declared type, with at most `max_output_retries` corrections (S-OUT-30, S-OUT-31)."""

from __future__ import annotations

import functools
import operator
import re
import sys
import types
import typing
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import UnionType
from typing import Generic, Protocol, TypeVar, cast

import msgspec
import pydantic
from msgspec import Struct
from pydantic_core import from_json, to_json

from ensemble_ray.errors import IllegalStateError, OutputParsingError
from ensemble_ray.errors.texts import brief
from ensemble_ray.prompts.output_format import correction_prompt
from ensemble_ray.text.answers import iter_json
from ensemble_ray.text.foreign_text import whole_data, whole_json, whole_text
from ensemble_ray.values.task_output import OutputType, type_name

_INFO, _WARNING = 20, 30  # levels as `logging` numbers them; the machine returns lines and does not log
_FENCED = re.compile(r"```([\w+#.-]*+)(.*?)```", re.DOTALL)  # any tag, so that fences pair correctly
_OPENING = re.compile(r'\{(?=\s*+["}])|\[(?=\s*+[\]\[{"\-\dtfn])')  # possible start of an object or array
_MOST_VALUES = 100  # only the last values and fenced blocks of an answer are examined
_SHOWN = 200  # characters of an answer without JSON in its error (S-OUT-21)
_SHOWN_MISTAKES = 20
UNKNOWN_TYPE = (pydantic.errors.PydanticUserError, pydantic.errors.PydanticUndefinedAnnotation)
_NEEDS_BACKPORT = sys.version_info < (3, 12)  # Pydantic needs `TypedDict` of typing_extensions

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseResult(Generic[T]):
    """Result of parsing one text: a value, or the reason of a failure."""

    value: T | None = None
    error_message: str | None = None

    @property
    def is_success(self) -> bool:
        """Whether parsing succeeded."""
        return self.error_message is None


def extract_json(raw: str | None) -> str | None:
    """Return the last JSON object or array in a model's answer as text; None if there is none.

    Examples:
        >>> extract_json('Perhaps {"city": "Bern"}? It is {"city": "Zurich"}.')
        '{"city": "Zurich"}'
    """
    values = _find_values((raw or "").strip())
    return values[-1] if values else None


def parse_output(raw: str | None, output_type: type[T] | UnionType) -> ParseResult[T]:
    """Parse a model's answer as an object of that type: the last JSON value in it that fits.

    Unknown properties are ignored unless the type itself forbids them. A bare JSON scalar is accepted
    if it fits the type.

    Args:
        raw: The answer.
        output_type: Any type that pydantic can validate.
    """
    text = (raw or "").strip()
    if not text:
        return ParseResult(error_message="LLM produced an empty response")
    try:
        adapter, form = adapter_of(cast("Hashable", output_type)), _form_of(cast("Hashable", output_type))
    except UNKNOWN_TYPE as error:
        return ParseResult(error_message=error.message)
    if form.is_text and (plain := _parse_plain(text, output_type)).is_success:
        return plain
    found = _find_values(text)
    problem: str | None = None
    for value in reversed(found or [text]):  # without an object or array, the text may be a bare scalar (S-OUT-21)
        try:
            return ParseResult(value=cast("T", adapter.validate_json(whole_json(value))))
        except pydantic.ValidationError as error:
            problem = problem or mistakes_of(error)
    if not form.is_object:
        plain = _parse_plain(text, output_type, found)
        if plain.is_success or not found:
            return plain
    if not found:
        shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
        return ParseResult(error_message=f"Could not find valid JSON in response: {shown}")
    return ParseResult(error_message=f"JSON could not be deserialized as {type_name(output_type)}: {problem}")


def restore_output(data: object, output_type: type[T] | UnionType) -> ParseResult[T]:
    try:
        # Strict types accept dates and enums from JSON text, but not from Python data.
        value = adapter_of(cast("Hashable", output_type)).validate_json(adapter_of(object).dump_json(whole_data(data)))
    except (ValueError, RecursionError, *UNKNOWN_TYPE) as error:
        return ParseResult(
            error_message=mistakes_of(error) if isinstance(error, pydantic.ValidationError) else str(error)
        )
    return ParseResult(value=cast("T", value))


def mistakes_of(error: pydantic.ValidationError) -> str:
    """Describe the mistakes and their places, without the values."""
    mistakes = error.errors(include_url=False, include_context=False, include_input=False)
    parts: list[str] = []
    for found in mistakes[:_SHOWN_MISTAKES]:
        where = ".".join(str(part) for part in found["loc"])
        parts.append(f"'{where}': {found['msg']}" if where else found["msg"])
    if len(mistakes) > _SHOWN_MISTAKES:
        parts.append(f"and {len(mistakes) - _SHOWN_MISTAKES} more")
    return "; ".join(parts)


class StructuredTask(Protocol):
    @property
    def description(self) -> str: ...

    @property
    def output_type(self) -> OutputType | None: ...

    @property
    def max_output_retries(self) -> int: ...


class StructuredMachine:
    def __init__(self, task: StructuredTask, *, agent_role: str, first_response: str | None) -> None:
        if task.output_type is None:
            msg = f"Task '{task.description[:80]}' has no output_type; there is nothing to parse"
            raise IllegalStateError(msg)
        self._output_type: OutputType = task.output_type
        self._description = task.description
        self._agent_role = agent_role
        self._attempts = 1 + max(0, task.max_output_retries)
        self._errors: list[str] = []
        self._log: list[tuple[int, str]] = []
        self._response = ""
        self._parsed: ParseResult[object] = ParseResult()
        self._parse(first_response)

    def next_prompt(self) -> str | None:
        if self._parsed.is_success or len(self._errors) >= self._attempts:
            return None
        return correction_prompt(self._output_type, problem=self._errors[-1], response=self._response)

    def accept(self, response: str | None) -> None:
        if self.next_prompt() is None:
            msg = f"Task '{self._description[:80]}': an answer came after the last attempt"
            raise IllegalStateError(msg)
        self._parse(response)

    def result(self, incomplete: str = "") -> object:
        """Return the parsed object, or raise `OutputParsingError` (S-OUT-33), perhaps for an `incomplete` answer."""
        if self._parsed.is_success:
            return self._parsed.value
        if self.next_prompt() is not None:
            msg = f"Task '{self._description[:80]}': attempt {len(self._errors) + 1} has not been answered"
            raise IllegalStateError(msg)
        reason, answer = brief(self._errors[-1]), brief(self._response)
        text = (
            f"Structured output parsing failed for task '{self._description[:80]}' "
            f"after {self._attempts} attempt(s). Expected type: {type_name(self._output_type)}. {reason}"
        )
        if answer.removesuffix("...") not in reason:  # the reason contains an answer without JSON
            text = f"{text}. Last answer: {answer}"
        if incomplete:
            text = f"{text}. {incomplete}"
        raise OutputParsingError(
            text,
            self._response,
            self._output_type,
            tuple(self._errors),
            self._attempts,
            self._description,
            self._agent_role,
        )

    def log_lines(self) -> list[tuple[int, str]]:
        """Return and remove the (level, text) of log lines (S-OUT-36)."""
        lines, self._log = self._log, []
        return lines

    def _parse(self, response: str | None) -> None:
        self._response = response or ""
        self._parsed = parse_output(self._response, self._output_type)  # an empty answer fails (S-OUT-38)
        attempt = f"attempt {len(self._errors) + 1}/{self._attempts}"
        subject = f"Agent '{self._agent_role}': structured output"
        if self._parsed.error_message is None:
            self._log.append((_INFO, f"{subject} parsed on {attempt}"))
            return
        self._errors.append(self._parsed.error_message)
        self._log.append((_WARNING, f"{subject} not parsed on {attempt}: {self._parsed.error_message}"))


def _find_values(text: str) -> list[str]:
    """Return the JSON objects and arrays in order; those in code of other languages come first."""
    spans = list(deque(((each.start, each.end) for each in iter_json(text, _OPENING)), _MOST_VALUES))
    code: list[tuple[int, int]] = []
    for block in (*deque(_FENCED.finditer(text), _MOST_VALUES), None):
        start, end = (0, len(text)) if block is None else block.span(2)
        if block is not None and block[1].lower() not in {"", "json"}:
            code += [each for each in spans if start <= each[0] < end]
            continue
        content = text[start:end]
        start, end = start + len(content) - len(content.lstrip()), start + len(content.rstrip())
        looks_like_json = end - start > 1 and text[start] + text[end - 1] in {"{}", "[]"}
        if looks_like_json and all(each[1] != end for each in spans):
            spans = [*(each for each in spans if not start <= each[0] < end), (start, end)]
    spans.sort(key=lambda span: (span not in code, span))
    return [text[start:end] for start, end in spans]


def _parse_plain(text: str, output_type: type[T] | UnionType, found: Sequence[str] = ()) -> ParseResult[T]:
    """Parse a text, number, or choice (S-LLM-50 to S-LLM-53), or the only member of an object in `found`."""
    adapter, form = adapter_of(cast("Hashable", output_type)), _form_of(cast("Hashable", output_type))
    fenced = _FENCED.fullmatch(text)
    bare = (text if fenced is None else fenced[2]).strip().strip("\"'`*").rstrip(".!").rstrip("\"'`*")
    problem: str | None = None
    for each in filter(None, (text, bare, form.choices.get(bare.casefold()))):
        with suppress(pydantic.ValidationError):
            return ParseResult(value=cast("T", adapter.validate_json(whole_json(each))))
        try:
            return ParseResult(value=cast("T", adapter.validate_python(whole_text(each))))
        except pydantic.ValidationError as error:
            problem = problem or mistakes_of(error)
    for each in reversed(found):
        with suppress(ValueError):  # broken JSON, or a value that does not fit either
            members: object = from_json(each)
            if isinstance(members, dict) and len(cast("dict[str, object]", members)) == 1:
                (inner,) = cast("dict[str, object]", members).values()
                return ParseResult(value=cast("T", adapter.validate_json(to_json(inner))))
    return ParseResult(error_message=f"The response is no {type_name(output_type)}: {problem}")


@functools.lru_cache(maxsize=256)
def adapter_of(annotation: Hashable) -> pydantic.TypeAdapter[object]:
    """Return the adapter of a type, or raise one of `UNKNOWN_TYPE`. Building one costs a hundred parses."""
    adapter = pydantic.TypeAdapter(
        typing.cast("type[object]", _use_backport(annotation, ()) if _NEEDS_BACKPORT else annotation)
    )
    if not adapter.pydantic_complete:  # an undefined name in the type raises here, not at the first use
        adapter.rebuild()
    return adapter


class _AnswerForm(Struct, frozen=True, kw_only=True):
    is_text: bool = False  # a text without quotes can be the answer
    is_object: bool = True
    choices: Mapping[str, str] = msgspec.field(
        default_factory=dict[str, str]
    )  # possible texts by their case-folded form


@functools.lru_cache(maxsize=256)
def _form_of(annotation: Hashable) -> _AnswerForm:
    try:
        schema = adapter_of(annotation).json_schema()
    except Exception:  # noqa: BLE001  a type's own hooks may raise anything
        return _AnswerForm()
    alternatives = [each for each in _alternatives(schema, schema.get("$defs", {})) if each.get("type") != "null"]
    choices = [text for each in alternatives for text in (*each.get("enum", ()), each.get("const"))]
    return _AnswerForm(
        is_text=all(each.get("type") == "string" for each in alternatives),
        is_object=all(each.get("type") == "object" for each in alternatives),
        choices={text.casefold(): text for text in choices if isinstance(text, str)},
    )


def _alternatives(node: typing.Any, definitions: Mapping[str, typing.Any]) -> Iterator[Mapping[str, typing.Any]]:
    while "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]]
    options = (*node.get("anyOf", ()), *node.get("oneOf", ()))
    for option in options:
        yield from _alternatives(option, definitions)
    if not options:
        yield node


def _use_backport(annotation: typing.Any, within: tuple[object, ...]) -> typing.Any:
    """Replace each `typing.TypedDict` in a type; `within` are the enclosing ones."""
    if typing.is_typeddict(annotation):
        # Pydantic supports a backported one, and decides about a recursive one.
        is_old = type(annotation).__module__ == "typing" and annotation not in within
        return _backport(annotation, within) if is_old else annotation
    arguments = typing.get_args(annotation)
    changed = tuple(_use_backport(argument, within) for argument in arguments)
    if all(new is old for new, old in zip(changed, arguments, strict=True)):
        return annotation
    origin: typing.Any = typing.get_origin(annotation)
    if origin is types.UnionType:
        return functools.reduce(operator.or_, changed)
    if origin is typing.Annotated or not hasattr(annotation, "copy_with"):
        return origin[changed]
    return annotation.copy_with(changed)


def _backport(annotation: typing.Any, within: tuple[object, ...]) -> typing.Any:
    import typing_extensions  # a dependency of pydantic, needed only here

    members: dict[str, object] = {}
    for name, hint in typing.get_type_hints(annotation, include_extras=True).items():
        member = _use_backport(hint, (*within, annotation))
        is_marked = typing.get_origin(hint) in {typing.Required, typing.NotRequired}
        members[name] = member if is_marked or name in annotation.__required_keys__ else typing.NotRequired[member]
    make: typing.Any = typing_extensions.TypedDict
    rebuilt = make(annotation.__name__, members)
    rebuilt.__module__, rebuilt.__doc__ = annotation.__module__, annotation.__doc__
    config: object = getattr(annotation, "__pydantic_config__", None)
    if config is not None:
        rebuilt.__pydantic_config__ = config
    return rebuilt
