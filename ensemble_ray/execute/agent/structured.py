"""From an answer's text to the declared type. Pure: no model, clock or log is touched here.

In: texts of a model. Out: parsed objects, correction prompts, and at the end an object or `OutputParsingError`.

Rules of the retries (`StructuredMachine`):
1. There are 1 + max_output_retries attempts; the agent's own answer is the first (S-OUT-30).
2. Each further one is one model call with the system prompt and a correction prompt, which holds the latest answer and
   what was wrong with it (S-OUT-31).
3. The first attempt that parses ends it; when none is left, the error tells of every one (S-OUT-32, S-OUT-33).
4. An empty answer is a failed attempt (S-OUT-38).
"""

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
from dataclasses import dataclass, field
from types import UnionType
from typing import Generic, Protocol, TypeVar, cast

import pydantic
from pydantic_core import from_json, to_json

from ensemble_ray.errors import IllegalStateError, OutputParsingError
from ensemble_ray.errors.texts import brief
from ensemble_ray.prompts.output_format import correction_prompt
from ensemble_ray.text.answers import iter_json
from ensemble_ray.text.foreign_text import whole_data, whole_json, whole_text
from ensemble_ray.values.task_output import OutputType, type_name

#: What `adapter_of` raises for a type of which pydantic can make nothing.
UNKNOWN_TYPE = (pydantic.errors.PydanticUserError, pydantic.errors.PydanticUndefinedAnnotation)

#: Before this, pydantic takes a `TypedDict` only from the backport.
_NEEDS_BACKPORT = sys.version_info < (3, 12)


@functools.lru_cache(maxsize=256)
def adapter_of(annotation: Hashable) -> pydantic.TypeAdapter[object]:
    """Return the adapter of a type; building one costs a hundred parses.

    Raises:
        PydanticUserError, PydanticUndefinedAnnotation: pydantic can make nothing of the type.
    """
    adapter = pydantic.TypeAdapter(
        typing.cast("type[object]", _readable(annotation, ()) if _NEEDS_BACKPORT else annotation)
    )
    if not adapter.pydantic_complete:  # it names a class that was not there; here it raises, and not at its first use
        adapter.rebuild()
    return adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """What an answer of a type looks like, as far as its JSON schema says."""

    #: whether its JSON is a string, so that a text without quotes can be one
    is_text: bool = False
    #: whether its JSON is an object, so that nothing else can be one
    is_object: bool = True
    #: texts that it is one of, by their case-folded form
    choices: Mapping[str, str] = field(default_factory=dict[str, str])


@functools.lru_cache(maxsize=256)
def form_of(annotation: Hashable) -> AnswerForm:
    """Return the form of a type's answers."""
    try:
        schema = adapter_of(annotation).json_schema()
    except Exception:  # noqa: BLE001  a type's own hooks may raise anything
        return AnswerForm()
    alternatives = [each for each in _alternatives(schema, schema.get("$defs", {})) if each.get("type") != "null"]
    choices = [text for each in alternatives for text in (*each.get("enum", ()), each.get("const"))]
    return AnswerForm(
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


def _readable(annotation: typing.Any, within: tuple[object, ...]) -> typing.Any:
    """Return the type with its `typing.TypedDict`s as the backport's; `within` are those that it stands in."""
    if typing.is_typeddict(annotation):
        # One of the backport's is fine, and one that holds itself is for pydantic to judge.
        is_old = type(annotation).__module__ == "typing" and annotation not in within
        return _backport(annotation, within) if is_old else annotation
    arguments = typing.get_args(annotation)
    changed = tuple(_readable(argument, within) for argument in arguments)
    if all(new is old for new, old in zip(changed, arguments, strict=True)):
        return annotation
    origin: typing.Any = typing.get_origin(annotation)
    if origin is types.UnionType:
        return functools.reduce(operator.or_, changed)
    if origin is typing.Annotated or not hasattr(annotation, "copy_with"):
        return origin[changed]
    return annotation.copy_with(changed)


def _backport(annotation: typing.Any, within: tuple[object, ...]) -> typing.Any:
    import typing_extensions  # pydantic's own dependency; only types of this kind need it here

    fields: dict[str, object] = {}
    for name, hint in typing.get_type_hints(annotation, include_extras=True).items():
        field = _readable(hint, (*within, annotation))
        says_so = typing.get_origin(hint) in {typing.Required, typing.NotRequired}
        fields[name] = field if says_so or name in annotation.__required_keys__ else typing.NotRequired[field]
    make: typing.Any = typing_extensions.TypedDict
    rebuilt = make(annotation.__name__, fields)
    rebuilt.__module__, rebuilt.__doc__ = annotation.__module__, annotation.__doc__
    config: object = getattr(annotation, "__pydantic_config__", None)
    if config is not None:
        rebuilt.__pydantic_config__ = config
    return rebuilt


#: Levels of log lines as the runner's `logging` numbers them; a machine tells lines, it does not log.
_INFO, _WARNING = 20, 30

T = TypeVar("T")

#: A fenced block: its tag and its content. Tags other than json are matched too, so that fences pair up rightly.
_FENCED = re.compile(r"```([\w+#.-]*+)(.*?)```", re.DOTALL)
#: Where an object or array may begin.
_OPENING = re.compile(r'\{(?=\s*+["}])|\[(?=\s*+[\]\[{"\-\dtfn])')
#: Values of one answer, and fenced blocks, that are looked at: the last ones.
_MOST_VALUES = 100
#: Characters of an answer without JSON that its error shows (S-OUT-21).
_SHOWN = 200
#: Mistakes of an answer that its correction prompt names; an answer may have one for every two of its characters.
_SHOWN_MISTAKES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseResult(Generic[T]):
    """What came of parsing one text."""

    #: the object; None where parsing failed
    value: T | None = None
    #: why parsing failed; None where it did not
    error_message: str | None = None

    @property
    def is_success(self) -> bool:
        """Whether there is an object."""
        return self.error_message is None


def extract_json(raw: str | None) -> str | None:
    """Return the last JSON object or array in a model's answer as text; None when there is none.

    Examples:
        >>> extract_json('Perhaps {"city": "Bern"}? It is {"city": "Zurich"}.')
        '{"city": "Zurich"}'
    """
    values = _find_values((raw or "").strip())
    return values[-1] if values else None


def _find_values(text: str) -> list[str]:
    """Return the objects and arrays in an answer, in its order; those in code of other languages come first."""
    spans = list(deque(((each.start, each.end) for each in iter_json(text, _OPENING)), _MOST_VALUES))
    code: list[tuple[int, int]] = []
    for block in (*deque(_FENCED.finditer(text), _MOST_VALUES), None):
        start, end = (0, len(text)) if block is None else block.span(2)
        if block is not None and block[1].lower() not in {"", "json"}:
            code += [each for each in spans if start <= each[0] < end]
            continue
        content = text[start:end]
        start, end = start + len(content) - len(content.lstrip()), start + len(content.rstrip())
        if _looks_like_json(text[start:end]) and all(each[1] != end for each in spans):
            # It is broken: a part of it is not the answer.
            spans = [*(each for each in spans if not start <= each[0] < end), (start, end)]
    spans.sort(key=lambda span: (span not in code, span))
    return [text[start:end] for start, end in spans]


def parse_output(raw: str | None, output_type: type[T] | UnionType) -> ParseResult[T]:
    """Parse a model's answer as an object of that type: the last JSON value in it that fits.

    Unknown properties are ignored unless the type itself forbids them. A bare JSON scalar is accepted
    where the type takes one.

    Args:
        raw: The answer.
        output_type: Any type that pydantic can validate.
    """
    text = (raw or "").strip()
    if not text:
        return ParseResult(error_message="LLM produced an empty response")
    try:
        adapter, form = adapter_of(cast("Hashable", output_type)), form_of(cast("Hashable", output_type))
    except UNKNOWN_TYPE as error:
        return ParseResult(error_message=error.message)
    if form.is_text and (plain := _read_plain(text, output_type)).is_success:
        return plain
    found = _find_values(text)
    problem: str | None = None
    # Without an object or array the whole text may still be a bare scalar (S-OUT-21).
    for value in reversed(found or [text]):
        try:
            return ParseResult(value=cast("T", adapter.validate_json(whole_json(value))))
        except pydantic.ValidationError as error:
            problem = problem or mistakes_of(error)
    if not form.is_object:
        plain = _read_plain(text, output_type, found)
        if plain.is_success or not found:
            return plain
    if not found:
        shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
        return ParseResult(error_message=f"Could not find valid JSON in response: {shown}")
    return ParseResult(error_message=f"JSON could not be deserialized as {type_name(output_type)}: {problem}")


def _read_plain(text: str, output_type: type[T] | UnionType, found: Sequence[str] = ()) -> ParseResult[T]:
    """Read an answer without JSON (S-LLM-50 to S-LLM-53): a text, a number, a choice; or a value alone in an object.

    Args:
        text: The answer, stripped.
        output_type: A type whose JSON is no object.
        found: The JSON values in the answer.
    """
    adapter, form = adapter_of(cast("Hashable", output_type)), form_of(cast("Hashable", output_type))
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
        with suppress(ValueError):  # it is broken, or does not fit either
            members: object = from_json(each)
            if isinstance(members, dict) and len(cast("dict[str, object]", members)) == 1:
                (inner,) = cast("dict[str, object]", members).values()
                return ParseResult(value=cast("T", adapter.validate_json(to_json(inner))))
    return ParseResult(error_message=f"The response is no {type_name(output_type)}: {problem}")


def restore_output(data: object, output_type: type[T] | UnionType) -> ParseResult[T]:
    """Restore an object of that type from recorded JSON data.

    Args:
        data: What the record holds.
        output_type: Any type that pydantic can validate.
    """
    try:
        # By its JSON text: strict types accept there what they refuse as Python data, dates and enums for example.
        value = adapter_of(cast("Hashable", output_type)).validate_json(adapter_of(object).dump_json(whole_data(data)))
    except (ValueError, RecursionError, *UNKNOWN_TYPE) as error:
        return ParseResult(
            error_message=mistakes_of(error) if isinstance(error, pydantic.ValidationError) else str(error)
        )
    return ParseResult(value=cast("T", value))


class StructuredTask(Protocol):
    """What the machine needs to know of a task."""

    @property
    def description(self) -> str:
        """What is to be done."""
        ...

    @property
    def output_type(self) -> OutputType | None:
        """Type of the answer."""
        ...

    @property
    def max_output_retries(self) -> int:
        """How many corrections may be asked for."""
        ...


class StructuredMachine:
    """Decides whether an answer is good, is to be corrected, or was the last one.

    Args:
        task: Its description, output type and retries.
        agent_role: Who answers.
        first_response: The agent's own answer.

    Raises:
        IllegalStateError: the task has no output type.
    """

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
        self._judge(first_response)

    def next_prompt(self) -> str | None:
        """Return the correction prompt of the next attempt; None when nothing is left to ask."""
        if self._parsed.is_success or len(self._errors) >= self._attempts:
            return None
        return correction_prompt(self._output_type, problem=self._errors[-1], response=self._response)

    def accept(self, response: str | None) -> None:
        """Take the answer to the last prompt.

        Raises:
            IllegalStateError: none was asked for.
        """
        if self.next_prompt() is None:
            msg = f"Task '{self._description[:80]}': an answer came after the last attempt"
            raise IllegalStateError(msg)
        self._judge(response)

    def result(self, incomplete: str = "") -> object:
        """Return the parsed object.

        Args:
            incomplete: What the error says of a last answer that was cut off; empty: it was whole.

        Raises:
            OutputParsingError: no attempt gave one.
            IllegalStateError: an attempt is still open.
        """
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
        if answer.removesuffix("...") not in reason:  # an answer without JSON is part of the reason
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
        """(level, text) of what happened since the last call, for the runner to log (S-OUT-36)."""
        lines, self._log = self._log, []
        return lines

    def _judge(self, response: str | None) -> None:
        self._response = response or ""
        self._parsed = parse_output(self._response, self._output_type)
        attempt = f"attempt {len(self._errors) + 1}/{self._attempts}"
        whose = f"Agent '{self._agent_role}': structured output"
        if self._parsed.error_message is None:
            self._log.append((_INFO, f"{whose} parsed on {attempt}"))
            return
        self._errors.append(self._parsed.error_message)
        self._log.append((_WARNING, f"{whose} not parsed on {attempt}: {self._parsed.error_message}"))


# Parts of parsing.


def _looks_like_json(text: str) -> bool:
    return len(text) > 1 and text[0] + text[-1] in {"{}", "[]"}


def mistakes_of(error: pydantic.ValidationError) -> str:
    """Say what was wrong and where, without the values: the answer is shown beside it."""
    mistakes = error.errors(include_url=False, include_context=False, include_input=False)
    parts: list[str] = []
    for found in mistakes[:_SHOWN_MISTAKES]:
        where = ".".join(str(part) for part in found["loc"])
        parts.append(f"'{where}': {found['msg']}" if where else found["msg"])
    if len(mistakes) > _SHOWN_MISTAKES:
        parts.append(f"and {len(mistakes) - _SHOWN_MISTAKES} more")
    return "; ".join(parts)
