"""Cases from lists and files, and their problems."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import Case, CsvFile, ValidationError
from ensemble_ray.evaluation.cases import check_inputs_of, place_cases
from ensemble_ray.testing import ScriptedModel

from .teams import make_team


def write(folder: Path, text: str, name: str = "cases.jsonl") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_cases_have_their_lines_when_a_json_file_has_blank_lines(tmp_path: Path) -> None:
    """S-EVL-2, S-EVL-3."""
    path = write(
        tmp_path, '\ufeff{"id": "a", "inputs": {"n": 1}, "expected": {"x": 2}, "tags": ["t"]}\n\n{"id": "b"}\n'
    )
    first, second = place_cases(path)
    assert first.case == Case("a", {"n": 1}, expected={"x": 2}, tags=["t"])
    assert first.case.shown_inputs() == {"n": "1"}
    assert second.case == Case("b")
    assert (first.place, second.place) == (f"{path}, line 1", f"{path}, line 3")


def test_columns_are_inputs_when_cases_are_a_csv_file(tmp_path: Path) -> None:
    """S-EVL-2."""
    path = write(tmp_path, "id;country;expected;tags\nfr;France;Paris;eu west\nxx;Atlantis;;\n", "cases.csv")
    expected = [
        Case("fr", {"country": "France"}, expected="Paris", tags=["eu", "west"]),
        Case("xx", {"country": "Atlantis"}),
    ]
    assert [each.case for each in place_cases(path)] == expected
    assert [each.case for each in place_cases(CsvFile(path, ";"))] == expected


def test_one_error_lists_all_problems_when_several_cases_are_wrong(tmp_path: Path) -> None:
    """S-EVL-3."""
    lines = [
        '{"id": "a"}',
        "{",
        '{"id": "a"}',
        '{"id": "b", "expcted": 1}',
        "[1]",
        '{"id": 7}',
        '{"id": "c", "inputs": 3}',
    ]
    path = write(tmp_path, "\n".join(lines))
    with pytest.raises(ValidationError) as raised:
        place_cases(path)
    text = str(raised.value)
    assert "line 2: not JSON" in text
    assert f"line 3: the id 'a' occurs twice, first in {path}, line 1" in text
    assert "line 4: unknown key 'expcted' of a case. Did you mean 'expected'?" in text
    assert "line 5: a case is an object with the keys 'id' and 'inputs', got: list" in text
    assert "line 6: 'id' must be a text, got: 7" in text
    assert "line 7: 'inputs' must be an object" in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere.jsonl", "There is no file of cases 'nowhere.jsonl'"),
        ("cases.txt", "Cases are read from a .jsonl or .csv file"),
        ([], "There are no cases"),
        (3, "cases must be the path of a file or a list of Case, got: int"),
    ],
)
def test_cases_are_refused_when_they_cannot_be_read(given: object, message: str) -> None:
    """S-EVL-2."""
    with pytest.raises(ValidationError, match=message):
        place_cases(given)


def test_a_case_is_refused_when_its_id_is_blank_or_too_long() -> None:
    """S-EVL-2."""
    with pytest.raises(ValidationError, match="Case id must not be blank"):
        Case(" ")
    with pytest.raises(ValidationError, match="Case id must have at most 256 characters, got 257"):
        Case("x" * 257)


def test_inputs_are_named_when_the_team_lacks_or_does_not_use_them() -> None:
    """S-EVL-3."""
    team = make_team(ScriptedModel())
    missing, unknown = check_inputs_of(place_cases([Case("a", {"contry": "France"})]), team)
    assert missing == "case 1: inputs are missing: [country] (country is used by task 1)"
    assert unknown == "case 1: no task uses the input 'contry'. Did you mean 'country'? Known: [country]"
    assert check_inputs_of(place_cases([Case("a")]), team.replace(inputs={"country": "France"})) == []
