"""Cases of evaluations: their values, their files, and their checks before the first run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct
from pydantic import Field

from ensemble_ray.definition import fields
from ensemble_ray.errors import ValidationError
from ensemble_ray.errors.texts import brief
from ensemble_ray.items.pulling import RefusedItem
from ensemble_ray.items.text_files import CsvFile, csv_rows, loads_line
from ensemble_ray.plan.planner import needed_inputs
from ensemble_ray.values.trace import jsonable
from ensemble_ray.values.value import FrozenSequence, Value

if TYPE_CHECKING:
    from ensemble_ray.definition.ensemble import EnsembleDefinition

MOST_CASES = 100_000
LONGEST_ID = 256  # characters: ids are values of tags of runs
_SHOWN_PROBLEMS = 20
_KEYS = ("id", "inputs", "expected", "tags")
_BOM = b"\xef\xbb\xbf"


class Case(Value):
    """A case of an evaluation: inputs of the team, and the expected output.

    Attributes:
        id: Names the case in results and comparisons: 1 to 256 characters, unique in an evaluation.
        inputs: Values of the team's template variables.
        expected: The expected output, in the form that the scorers read: a text, a number, a list or a mapping of fields.
            None: there is none.
        tags: Labels of groups of cases. Results are summarized for each tag, too.
    """

    id: fields.StrictText = Field(kw_only=False)
    inputs: Mapping[str, Any] = Field(default={}, kw_only=False)
    expected: Any = None
    tags: FrozenSequence[str] = ()

    @fields.checks_arguments
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> None:
        name = arguments.get("id")
        fields.check_text(name, "Case id must not be blank")
        if isinstance(name, str) and len(name) > LONGEST_ID:
            raise ValidationError(
                f"Case id must have at most {LONGEST_ID} characters, got {len(name)}: '{brief(name)}'"
            )
        if arguments.get("inputs", {}) is None:
            arguments["inputs"] = {}

    def shown_inputs(self) -> dict[str, str]:
        """Return the inputs as texts."""
        return {name: text_of(value) for name, value in self.inputs.items()}


class PlacedCase(Struct, frozen=True, kw_only=True):
    case: Case
    place: str  # for messages, such as `cases.jsonl, line 3`


def text_of(value: object, *, indent: int | None = None) -> str:
    """Return a text as it is, and another value as JSON."""
    return value if isinstance(value, str) else json.dumps(jsonable(value), ensure_ascii=False, indent=indent)


def place_cases(given: object) -> Sequence[PlacedCase]:
    """Return the cases of a file, or of a list of `Case`s and mappings, each with its place.

    Raises:
        ValidationError: a case is invalid, an id occurs twice, or there is no case. The message lists all problems with lines.
    """
    found, problems = list[PlacedCase](), list[str]()
    for place, value in _read(given):
        if len(found) >= MOST_CASES:
            raise ValidationError(f"{place}: an evaluation has at most {MOST_CASES:,} cases")
        try:
            found.append(PlacedCase(case=_case_of(value), place=place))
        except ValidationError as error:
            problems.append(f"{place}: {error}")
    first: dict[str, str] = {}
    for each in found:
        if each.case.id in first:
            problems.append(
                f"{each.place}: the id '{brief(each.case.id)}' occurs twice, first in {first[each.case.id]}"
            )
        first.setdefault(each.case.id, each.place)
    if not found and not problems:
        where = f" in '{given}'" if isinstance(given, str | Path) else ""
        raise ValidationError(
            f"There are no cases{where}. What to do: write one JSON object per line, with 'id' and 'inputs'"
        )
    refuse_cases(problems)
    return found


def refuse_cases(problems: Sequence[str]) -> None:
    """Raise one error with all problems, if there are any."""
    if len(problems) == 1:
        raise ValidationError(problems[0])
    if problems:
        more = [f"and {len(problems) - _SHOWN_PROBLEMS} more"] if len(problems) > _SHOWN_PROBLEMS else []
        listed = "\n  ".join([*problems[:_SHOWN_PROBLEMS], *more])
        raise ValidationError(f"The cases have {len(problems)} problems:\n  {listed}")


def check_inputs_of(cases: Iterable[PlacedCase], team: EnsembleDefinition) -> list[str]:
    """Return the problems of inputs that the team lacks or does not use, with their places."""
    needed = needed_inputs(team.all_tasks)
    problems: list[str] = []
    for each in cases:
        missing = [name for name in needed if name not in {**team.inputs, **each.case.inputs}]
        if missing:
            users = "; ".join(f"{name} is used by {', '.join(needed[name][:3])}" for name in missing)
            problems.append(f"{each.place}: inputs are missing: [{', '.join(missing)}] ({users})")
        for name in each.case.inputs:
            if name not in needed:
                near = fields.nearest(name, tuple(needed))
                problems.append(f"{each.place}: no task uses the input '{name}'.{near} Known: [{', '.join(needed)}]")
    return problems


def _read(given: object) -> Iterator[tuple[str, object]]:
    if isinstance(given, CsvFile):
        yield from _csv_cases(given)
    elif isinstance(given, str | Path):
        path = Path(given).expanduser()
        if path.suffix.lower() not in {".jsonl", ".csv"}:
            raise ValidationError(f"Cases are read from a .jsonl or .csv file, got: '{given}'")
        if not path.is_file():
            raise ValidationError(f"There is no file of cases '{given}'")
        yield from (_csv_cases(CsvFile(path)) if path.suffix.lower() == ".csv" else _json_cases(path))
    elif isinstance(given, Iterable) and not isinstance(given, Mapping | bytes):
        yield from ((f"case {number}", each) for number, each in enumerate(cast("Iterable[object]", given), start=1))
    else:
        raise ValidationError(f"cases must be the path of a file or a list of Case, got: {type(given).__name__}")


def _json_cases(path: Path) -> Iterator[tuple[str, object]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(_BOM).strip() if number == 1 else line.strip()
            if not text:
                continue
            place = f"{path}, line {number}"
            try:
                yield place, loads_line(text)
            except ValueError as error:
                yield place, ValidationError(f"not JSON: {error}")


def _csv_cases(source: CsvFile) -> Iterator[tuple[str, object]]:
    """A column is an input, except `id`, `expected` and `tags`; tags are separated by spaces."""
    for entry in csv_rows(source):
        if isinstance(entry, RefusedItem):
            yield f"{source.path}, row {entry.index + 1}", entry.error
            continue
        index, row = entry
        texts = cast("Mapping[str, str]", row)
        inputs = {name: value for name, value in texts.items() if name not in _KEYS}
        found: dict[str, object] = {"id": texts.get("id", ""), "inputs": inputs, "tags": texts.get("tags", "").split()}
        yield f"{source.path}, row {index + 1}", {**found, "expected": texts.get("expected") or None}


def _case_of(value: object) -> Case:
    if isinstance(value, Case):
        return value
    if isinstance(value, ValidationError):
        raise value
    if not isinstance(value, Mapping):
        raise ValidationError(f"a case is an object with the keys 'id' and 'inputs', got: {type(value).__name__}")
    found = cast("Mapping[str, object]", value)
    if unknown := [name for name in found if name not in _KEYS]:
        near = fields.nearest(str(unknown[0]), _KEYS)
        raise ValidationError(f"unknown key '{unknown[0]}' of a case.{near} Known: [{', '.join(_KEYS)}]")
    given = found.get("inputs") or {}
    if not isinstance(given, Mapping):
        raise ValidationError(f"'inputs' must be an object of names and values, got: {type(given).__name__}")
    if not isinstance(found.get("id"), str):
        raise ValidationError(f"'id' must be a text, got: {json.dumps(jsonable(found.get('id')))}")
    return Case(**cast("Mapping[str, Any]", found))
