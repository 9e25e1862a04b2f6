"""Environment variables in team files."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ensemble_ray import Ensemble, OpenAIChatModel
from ensemble_ray.teamfile.document import expand, may_be_secret, takes_variables

TASKS = "tasks: {a: {description: 'Say ${X} about {topic}', expected_output: '${X}'}}"


@pytest.mark.parametrize(
    ("text", "expected", "missing"),
    [
        ("${A}", "1", []),
        ("x${A}y${A}z", "x1y1z", []),
        ("${B:-two}", "two", []),
        ("${EMPTY:-two}${EMPTY}", "two", []),
        ("${B}${C}${B}", "", ["B", "C"]),
        ("$${A} $$ $A ${} ${1x} ${A", "${A} $$ $A ${} ${1x} ${A", []),
        ("${D}", "${A}", []),
    ],
)
def test_variables_are_expanded_once(text: str, expected: str, missing: list[str]) -> None:
    """S-SET-58: values are texts; what stands in them is not expanded again."""
    assert expand(text, {"A": "1", "EMPTY": "", "D": "${A}"}) == (expected, missing)


def test_a_long_text_is_read_once() -> None:
    """S-SEC-20: openings that never close cost no more than other text."""
    text = "${A:-" * 40_000
    assert expand(text, {}) == (text, [])


@pytest.mark.parametrize(
    ("where", "takes", "is_secret"),
    [
        ("llm", True, False),
        ("llm.base_url", True, False),
        ("agents.writer.llm.extra_headers.Authorization", True, True),
        ("llm.extra_query.code", True, True),
        ("agents.writer.goal", True, False),
        ("inputs.topic", True, False),
        ("map_reduce.items", True, False),
        ("tasks.a.description", False, False),
        ("tasks.a.handler", False, False),
        ("agents.writer.tools[0]", False, False),
        ("tools.web.headers.X", False, True),
    ],
)
def test_values_that_take_variables(where: str, takes: bool, is_secret: bool) -> None:  # noqa: FBT001  a table
    """S-SET-58: no template, no name of code, no key."""
    assert (takes_variables(where), may_be_secret(where)) == (takes, is_secret)


def test_team_takes_its_model_from_the_environment(
    load: Callable[[str], Ensemble], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-SET-58: texts and numbers; templates stay as they are."""
    monkeypatch.setenv("PLACE", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("MOST", "7")
    team = load(
        "llm: {model: 'openai:${MODEL:-small}', base_url: '${PLACE}'}\nmax_parallel_tasks: ${MOST}\nworkflow: parallel\n"
        + TASKS
    )
    assert isinstance(team.llm, OpenAIChatModel)
    assert (team.llm.model, team.llm.base_url, team.max_parallel_tasks) == ("small", "http://127.0.0.1:9/v1", 7)
    assert team.tasks[0].description == "Say ${X} about {topic}"


def test_unset_variable_is_told_with_its_place(
    refused: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-SET-58: line, column, and what to do."""
    monkeypatch.delenv("NOWHERE", raising=False)
    (told,) = refused("llm: {model: m, base_url: '${NOWHERE}'}\n" + TASKS)[:1]
    assert told.startswith(
        "team.yaml:1:27: llm.base_url: the environment variable 'NOWHERE' is not set: export NOWHERE=..."
    )


def test_key_is_refused_where_a_variable_would_bring_it_in(refused: Callable[[str], list[str]]) -> None:
    """S-SET-58: it would stand in the record."""
    told = "\n".join(refused("llm: {model: m, extra_headers: {Authorization: 'Bearer ${TOKEN}'}}\n" + TASKS))
    assert "a key does not come into a file by ${...}" in told


def test_number_stays_a_text_when_it_is_quoted(
    load: Callable[[str], Ensemble], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-SET-58: as without variables; and nothing becomes a list, a flag or a reference."""
    monkeypatch.setenv("YEAR", "2026")
    monkeypatch.setenv("LIST", "[1, 2]")
    team = load("llm: openai:m\ninputs:\n  year: '${YEAR}'\n  list: ${LIST}\n" + TASKS)
    assert dict(team.inputs) == {"year": "2026", "list": "[1, 2]"}
