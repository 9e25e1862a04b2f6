"""Scorers of the outputs of cases."""

from __future__ import annotations

import json
import math
import re
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias, cast

from pydantic import BeforeValidator, Field, SkipValidation

from ensemble_ray.definition import fields
from ensemble_ray.errors import ValidationError
from ensemble_ray.errors.texts import brief
from ensemble_ray.evaluation.cases import Case, text_of
from ensemble_ray.execute.agent.structured import extract_json
from ensemble_ray.execute.callables import callable_name
from ensemble_ray.memory.embedding_models import resolve_embedding_model
from ensemble_ray.process.concurrency import call_user, threads
from ensemble_ray.values.outputs import EnsembleOutput
from ensemble_ray.values.trace import jsonable
from ensemble_ray.values.value import FrozenSequence, Value

#: A number in a text, such as `1,234.5` or `-3e8`.
_NUMBER = re.compile(r"[-+]?+\d++(?:,\d{3}(?!\d))*+(?:\.\d++)?+(?:[eE][-+]?\d++)?+")
_LONGEST_SEARCHED = 20_000  # characters of an output: the time of a user's expression has no limit
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Score:
    """A score of one output.

    Attributes:
        value: Usually from 0, wrong, to 1, right; any finite number.
        reason: Why, for people.
    """

    value: float
    reason: str = ""


#: The result of a scoring function.
Scored: TypeAlias = Score | float | bool
ScoringFunction: TypeAlias = Callable[[EnsembleOutput, Case], Scored | Awaitable[Scored]]


class Scorer(Value):
    """The base of scorers. Subclass it, or pass a function of an output and a case that returns a score.

    Attributes:
        name: Names its scores in results; unique in an evaluation. Default: the kind of the scorer.
    """

    kind: ClassVar[str] = "scorer"

    name: fields.StrictText = Field(default="", kw_only=True)

    @property
    def label(self) -> str:
        """The name of its scores."""
        return self.name or self.kind

    def problem(self, case: Case) -> str:
        """Return why this scorer cannot score a case, or an empty text. It is called before the first run."""
        del case
        return ""

    @abstractmethod
    async def score(self, output: EnsembleOutput, case: Case) -> Score:
        """Return the score of the output of a completed run. An error is reported for this case and scorer."""
        raise NotImplementedError


class _ExpectingScorer(Scorer):
    def problem(self, case: Case) -> str:
        return "" if case.expected is not None else f"the scorer '{self.label}' needs 'expected', and the case has none"


class ExactMatch(_ExpectingScorer):
    """1 if the output equals `expected`, else 0. If `expected` is no text, the JSON of the output is compared.

    Attributes:
        ignore_case: Whether upper and lower case are equal. Spaces around texts are always ignored.
    """

    kind = "exact"

    ignore_case: bool = False

    async def score(self, output: EnsembleOutput, case: Case) -> Score:
        """Compare the output with `expected`."""
        if not isinstance(case.expected, str):
            found = _data_of(output)
            return _verdict(found == jsonable(case.expected), f"the output is {_shown(found)}")
        is_equal = _folded(output.raw.strip(), self.ignore_case) == _folded(case.expected.strip(), self.ignore_case)
        return _verdict(is_equal, f"the output is {_shown(output.raw)}")


class Contains(Scorer):
    """The share of texts that the output contains.

    Attributes:
        texts: The texts; default: `expected` of the case, a text or a list of texts.
        ignore_case: Whether upper and lower case are equal.
    """

    kind = "contains"

    texts: FrozenSequence[str] = ()
    ignore_case: bool = False

    def problem(self, case: Case) -> str:
        """Refuse a case without texts."""
        if self._texts(case):
            return ""
        return f"the scorer '{self.label}' needs 'expected', a text or a list of texts, got: {_shown(case.expected)}"

    async def score(self, output: EnsembleOutput, case: Case) -> Score:
        """Search each text."""
        texts, raw = self._texts(case), _folded(output.raw, self.ignore_case)
        missing = [each for each in texts if _folded(each, self.ignore_case) not in raw]
        reason = f"missing: {', '.join(map(_shown, missing))}" if missing else ""
        return Score(1 - len(missing) / len(texts), reason)

    def _texts(self, case: Case) -> Sequence[str]:
        if self.texts:
            return self.texts
        expected: object = case.expected
        many = cast("Sequence[object]", expected if isinstance(expected, list | tuple) else [expected])
        return (
            [each for each in many if isinstance(each, str) and each] if all(isinstance(e, str) for e in many) else []
        )


def _compile(text: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(text)
    except re.error as error:
        raise ValidationError(f"'{brief(text)}' is no regular expression: {error}") from None
    return compiled


def _check_pattern(value: object) -> object:
    if isinstance(value, str):
        _compile(value)
    return value


class RegexMatch(Scorer):
    """1 if a regular expression of Python matches a part of the output, else 0.

    Attributes:
        pattern: The expression; default: `expected` of the case. It searches the first 20,000 characters.
    """

    kind = "regex"

    pattern: Annotated[str | None, BeforeValidator(_check_pattern)] = Field(default=None, kw_only=False)

    def problem(self, case: Case) -> str:
        """Refuse a case without an expression."""
        pattern = self.pattern or case.expected
        if not isinstance(pattern, str):
            return f"the scorer '{self.label}' needs 'expected', a regular expression, got: {_shown(case.expected)}"
        try:
            _compile(pattern)
        except ValidationError as error:
            return f"the scorer '{self.label}': {error}"
        return ""

    async def score(self, output: EnsembleOutput, case: Case) -> Score:
        """Search the expression."""
        pattern = self.pattern or str(case.expected)
        found = await threads.run(_compile(pattern).search, output.raw[:_LONGEST_SEARCHED])
        return _verdict(found is not None, f"no match of {_shown(pattern)}")


class JsonFields(_ExpectingScorer):
    """The share of fields of the parsed output, or of the JSON in the output, that equal those of `expected`.

    Attributes:
        names: Names of the fields; `total.amount` is the field of a field. Default: all fields of `expected`.
        tolerance: Largest absolute difference of numbers.
    """

    kind = "json_fields"

    names: FrozenSequence[str] = Field(default=(), kw_only=False)
    tolerance: fields.StrictAmount = Field(default=0.0, ge=0)

    def problem(self, case: Case) -> str:
        """Refuse a case without one of the fields."""
        if not isinstance(case.expected, Mapping) or not case.expected:
            return f"the scorer '{self.label}' needs 'expected', an object with fields, got: {_shown(case.expected)}"
        missing = [name for name in self.names if _field(case.expected, name) is _MISSING]
        known = ", ".join(map(str, cast("Mapping[object, object]", case.expected)))
        return f"the scorer '{self.label}': 'expected' has no field '{missing[0]}'. Known: [{known}]" if missing else ""

    async def score(self, output: EnsembleOutput, case: Case) -> Score:
        """Compare each field."""
        found, names = _data_of(output), self.names or tuple(cast("Mapping[str, object]", case.expected))
        if found is None:
            return Score(0.0, "the output has no JSON")
        differing: list[str] = []
        for name in names:
            expected, actual = jsonable(_field(case.expected, name)), _field(found, name)
            if actual is _MISSING:
                differing.append(f"{name}: missing")
            elif not _equal(expected, actual, self.tolerance):
                differing.append(f"{name}: {_shown(actual)} instead of {_shown(expected)}")
        return Score(1 - len(differing) / len(names), "; ".join(differing))


class NumericMatch(_ExpectingScorer):
    """1 if the number of the output is near `expected`, else 0. The number is the parsed output, or the last one in the text.

    Attributes:
        tolerance: Largest absolute difference.
        relative: Largest difference as a share of `expected`, such as 0.01. The larger of both limits counts.
    """

    kind = "numeric"

    tolerance: fields.StrictAmount = Field(default=0.0, ge=0)
    relative: fields.StrictAmount = Field(default=0.0, ge=0)

    def problem(self, case: Case) -> str:
        """Refuse a case without a number."""
        if _number(case.expected) is not None:
            return ""
        return f"the scorer '{self.label}' needs 'expected', a number, got: {_shown(case.expected)}"

    async def score(self, output: EnsembleOutput, case: Case) -> Score:
        """Compare the numbers."""
        expected, parsed = _number(case.expected), _parsed_of(output)
        found = _number(parsed) if isinstance(parsed, int | float) else _number(output.raw)
        if found is None or expected is None:
            return Score(0.0, "the output has no number")
        limit = max(self.tolerance, self.relative * abs(expected))
        return _verdict(abs(found - expected) <= limit + 1e-12 * abs(expected), f"the output is {found:g}")


class Similarity(_ExpectingScorer):
    """Cosine similarity of the embeddings of the output and of `expected`, from 0 to 1.

    Attributes:
        model: `"local"`, `"openai:MODEL"`, or an object with `embed(text)`.
    """

    kind = "similarity"

    model: Annotated[Any, SkipValidation] = "local"

    @fields.checks_arguments
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> None:
        arguments["model"] = resolve_embedding_model(arguments.get("model", "local"))

    async def score(self, output: EnsembleOutput, case: Case) -> Score:
        """Compare the embeddings."""
        first: Sequence[float] = await call_user(self.model.embed, output.raw)
        second: Sequence[float] = await call_user(self.model.embed, text_of(case.expected))
        length = math.hypot(*first) * math.hypot(*second)
        product = sum(a * b for a, b in zip(first, second, strict=True))
        return Score(min(1.0, max(0.0, product / length)) if length else 0.0)


class FunctionScorer(Scorer):
    """The score that a function returns: `score(output, case)`, sync or async.

    Attributes:
        function: Called with the `EnsembleOutput` and the `Case`. It returns a `Score`, a number, True or False.
    """

    kind = "function"

    function: Annotated[Any, SkipValidation] = Field(kw_only=False)

    @fields.checks_arguments
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> None:
        if not callable(function := arguments.get("function")):
            raise ValidationError(f"A scoring function must be callable, got: {type(function).__name__}")

    @property
    def label(self) -> str:
        """The name of its scores; default: the function's name."""
        return self.name or callable_name(self.function)

    async def score(self, output: EnsembleOutput, case: Case) -> Score:
        """Call the function."""
        return score_of(await call_user(cast("ScoringFunction", self.function), output, case), self.label)


def score_of(value: object, label: str) -> Score:
    """Return the result of a user's scorer as a score, or raise a ValidationError."""
    found = value if isinstance(value, Score) else Score(float(value)) if isinstance(value, int | float) else None
    if found is None or not isinstance(found.value, int | float) or not math.isfinite(found.value):
        raise ValidationError(
            f"The scorer '{label}' must return a Score, a finite number, True or False, got: {_shown(value)}"
        )
    return Score(float(found.value), str(found.reason))


#: Scorers that a name alone declares.
NAMED: Mapping[str, type[Scorer]] = {
    each.kind: each for each in (ExactMatch, Contains, RegexMatch, JsonFields, NumericMatch, Similarity)
}


def scorer_of(value: object) -> Scorer:
    """Return a scorer for a scorer, a name such as `"exact"`, or a function.

    Raises:
        ValidationError: it is neither.
    """
    if isinstance(value, Scorer):
        return value
    if isinstance(value, str):
        if value in NAMED:
            return NAMED[value]()
        near = fields.nearest(value, tuple(NAMED))
        raise ValidationError(
            f"Unknown scorer '{brief(value)}'.{near} Known: [{', '.join(NAMED)}], or a Scorer or function"
        )
    if callable(value) and not isinstance(value, type):
        return FunctionScorer(value)
    raise ValidationError(
        f"A scorer must be a Scorer, a name or a function of an output and a case, got: {type(value).__name__}"
    )


def check_labels(scorers: Sequence[Scorer]) -> None:
    labels = [each.label for each in scorers]
    for label in labels:
        if labels.count(label) > 1:
            raise ValidationError(f"Two scorers are named '{label}'. What to do: name one of them, name='{label}-2'")


def _verdict(is_right: bool, why_not: str) -> Score:  # noqa: FBT001  the subject of the call
    return Score(1.0) if is_right else Score(0.0, why_not)


def _folded(text: str, ignore_case: bool) -> str:  # noqa: FBT001  as above
    return text.casefold() if ignore_case else text


def _shown(value: object) -> str:
    return brief(text_of(value))


def _parsed_of(output: EnsembleOutput) -> object:
    last = output.last_completed_output
    return None if last is None or last.parsed_output is None else jsonable(last.parsed_output)


def _data_of(output: EnsembleOutput) -> object:
    """Return the parsed output, or the last JSON value in the text; None without both."""
    parsed = _parsed_of(output)
    if parsed is not None:
        return parsed
    try:
        return cast("object", json.loads(output.raw))
    except ValueError:
        text = extract_json(output.raw)
        return None if text is None else cast("object", json.loads(text))


def _field(data: object, path: str) -> object:
    if isinstance(data, Mapping) and path in data:
        return cast("object", data[path])
    for step in path.split("."):
        if not isinstance(data, Mapping) or step not in data:
            return _MISSING
        data = cast("object", data[step])
    return data


def _equal(expected: object, actual: object, tolerance: float) -> bool:
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return abs(expected - actual) <= tolerance + 1e-12 * abs(expected)
    if isinstance(expected, str) and isinstance(actual, str):
        return expected.strip() == actual.strip()
    return expected == actual


def _number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if math.isfinite(value) else None
    if not isinstance(value, str):
        return None
    last = None
    for found in _NUMBER.finditer(value):
        last = found[0]
    return None if last is None else float(last.replace(",", ""))
