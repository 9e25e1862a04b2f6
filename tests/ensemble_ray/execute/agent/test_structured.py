"""From an answer's text to the declared type: extraction, parsing, and the decision about retries."""

import json
import logging
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from ensemble_ray import (
    IllegalStateError,
    OutputParsingError,
    ParseResult,
    TaskExecutionError,
    describe_schema,
    extract_json,
    parse_output,
)
from ensemble_ray.execute.agent.structured import StructuredMachine


class City(BaseModel):
    name: str
    people: int | None = None


GOOD = '{"name": "Bern", "people": 134}'


# Extraction.


@pytest.mark.parametrize(
    "raw",
    [
        '```json\n{"a": 1}\n```',
        '```JSON\n{"a": 1}\n```',
        '```\n{"a": 1}\n```',
        '```{"a": 1}```',
        'Sure!\n```json\n  {"a": 1}  \n```\nAnything else?',
        '```python\nprint({})\n```\nand\n```json\n{"a": 1}\n```',
        '```\nno JSON\n```\n```json\n{"a": 1}\n```',
        '```json\n{"b": 2}\n```\n```json\n{"a": 1}\n```',
        '```json\n{"a": 1}\n```\nCall it:\n```python\nf({"a": 2})\n```',
    ],
)
def test_fenced_block_is_taken_when_it_looks_like_json(raw: str) -> None:
    """S-OUT-10: the last one, tagged json or not at all, stripped; before code of another language."""
    assert extract_json(raw) == '{"a": 1}'


def test_fenced_array_is_taken_when_there_is_one() -> None:
    """S-OUT-10: arrays as well; what is inside is not judged here."""
    assert extract_json("```\n[1, 2]\n```") == "[1, 2]"
    assert extract_json("```json\n{not: json}\n```") == "{not: json}"


@pytest.mark.parametrize("raw", ['{"a": 1}', "[1]", "{}", "[]", "{broken}", '{"a": "```"}'])
def test_whole_text_is_taken_when_it_looks_like_json(raw: str) -> None:
    """S-OUT-11: by its first and last character, stripped."""
    assert extract_json(f"  \n{raw}\n ") == raw


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ('The answer is {"a": {"b": [1, {}]}} as asked.', '{"a": {"b": [1, {}]}}'),
        ('It is {"a": "} { ]"}.', '{"a": "} { ]"}'),
        ('{oops} then {"b": 2} then {"a": 1}.', '{"a": 1}'),
        ("A list: [1, 2] and more", "[1, 2]"),
        ('{"b": 2}? No: {"a": 1}', '{"a": 1}'),
        ('```json\n{"b": 2}\n```\nBetter: {"a": 1}', '{"a": 1}'),
        ('It is {"x": {"b": 2}, {"c": 3} or {"a": 1}.', '{"a": 1}'),
        ('```json\n{"a": 1}', '{"a": 1}'),
        ('```json\n{"code": "```py\\nx\\n```"}\n```', '{"code": "```py\\nx\\n```"}'),
    ],
)
def test_embedded_json_is_found_when_it_decodes(raw: str, found: str) -> None:
    """S-OUT-12: in prose, nested, with braces in strings, after something that only looks like it."""
    assert extract_json(raw) == found


@pytest.mark.parametrize(
    "raw", [None, "", "  \n", "no JSON here", "{", "[[", '{"a": 1', "42", "a ] b [", '[{"a": 1}, {"a": 2},']
)
def test_nothing_is_found_when_nothing_is_there(raw: str | None) -> None:
    """S-OUT-12: None, blank, prose, something cut off, a scalar."""
    assert extract_json(raw) is None


def test_nesting_beyond_reason_is_no_json() -> None:
    """S-OUT-12: a model's garbage ends no process."""
    assert extract_json("x" + "[" * 20_000) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.heavy
@settings(max_examples=100)
@given(value=st.lists(json_values, max_size=4) | st.dictionaries(st.text(), json_values, max_size=4))
def test_object_in_prose_is_found_whatever_it_holds(value: object) -> None:
    """S-OUT-12: exactly the text of the object, whatever its strings contain."""
    text = json.dumps(value)
    found = extract_json(f"Here: {text}. Done.")
    assert found is not None
    assert json.loads(found) == value or "```" in text


# Parsing.


def test_object_is_given_when_the_answer_fits() -> None:
    """S-OUT-20, S-OUT-21: a value and no error."""
    result = parse_output(f"Here you are:\n```json\n{GOOD}\n```", City)
    assert result == ParseResult(value=City(name="Bern", people=134))
    assert result.is_success
    assert result.error_message is None


@pytest.mark.parametrize("raw", [None, "", " \n "])
def test_empty_answer_is_named_when_there_is_no_text(raw: str | None) -> None:
    """S-OUT-20, S-OUT-21: a failure is the message, without a value."""
    result = parse_output(raw, City)
    assert result.error_message == "LLM produced an empty response"
    assert not result.is_success
    assert result.value is None


def test_answer_is_cited_when_it_holds_no_json() -> None:
    """S-OUT-21: its first 200 characters, dots only where something was cut; a scalar does not fit a model."""
    assert parse_output("a" * 200, City).error_message == f"Could not find valid JSON in response: {'a' * 200}"
    assert parse_output("a" * 201, City).error_message == f"Could not find valid JSON in response: {'a' * 200}..."
    assert parse_output("42", City).error_message == "Could not find valid JSON in response: 42"


@pytest.mark.parametrize(("raw", "kind", "value"), [('"x"', str, "x"), ("true", bool, True), (" 42\n", int, 42)])
def test_bare_scalar_is_parsed_when_the_type_takes_one(raw: str, kind: type[object], value: object) -> None:
    """S-OUT-21: the whole stripped text is tried before giving up."""
    assert parse_output(raw, kind).value == value


class Verdict(Enum):
    YES = "yes"
    NO = "no"


@pytest.mark.parametrize(
    ("raw", "kind", "value"),
    [
        ("It is fine.", str, "It is fine."),
        ('{"a": 1}', str, '{"a": 1}'),
        ('"Quoted" is a word', str, '"Quoted" is a word'),
        ("null", str | None, None),
        ("yes", Verdict, Verdict.YES),
        ("**No.**", Verdict, Verdict.NO),
        ("```\nYES\n```", Verdict | None, Verdict.YES),
        ("Two words", Literal["two words", 2], "two words"),
        ("2", Literal["two words", 2], 2),
        ("2026-01-02", date, date(2026, 1, 2)),
        ("`42`.", int, 42),
        ("-0.5", float, -0.5),
        ("True", bool, True),
        ("null", int | None, None),
        ("five", int | str, "five"),
        ("5", int | str, 5),
        ('It is {"name": "Bern"}', City | str, City(name="Bern")),
        ("I do not know [yet].", City | str, "I do not know [yet]."),
        ('["a"] or ["a", "b"]', list[str], ["a", "b"]),
        ("[1, 2]", tuple[int, int], (1, 2)),
        ('[{"name": "Bern"}]', list[City] | None, [City(name="Bern")]),
    ],
)
def test_answer_without_json_is_read_when_the_type_needs_none(raw: str, kind: type[object], value: object) -> None:
    """S-LLM-50, S-LLM-51, S-LLM-52, S-OUT-39: texts, choices, numbers, collections and alternatives, as models write them."""
    assert parse_output(raw, kind) == ParseResult(value=value)


@pytest.mark.parametrize(
    ("raw", "kind", "value"),
    [
        ('{"verdict": "no"}', Verdict, Verdict.NO),
        ('```json\n{"count": 42}\n```', int, 42),
        ('{"items": [1, 2]}', list[int], [1, 2]),
    ],
)
def test_value_alone_in_an_object_is_the_answer(raw: str, kind: type[object], value: object) -> None:
    """S-LLM-53: endpoints that are asked for JSON may write objects only."""
    assert parse_output(raw, kind) == ParseResult(value=value)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        ("perhaps", Verdict),
        ("yes and no", Verdict),
        (".5", int),
        ("forty", int),
        ("I think 42", int),
        ("maybe", bool),
        ('{"a": 1, "b": 2}', int),
        ("none", list[str]),
    ],
)
def test_answer_is_asked_for_again_when_it_is_no_value_of_the_type(raw: str, kind: type[object]) -> None:
    """S-LLM-52: nothing is guessed."""
    assert not parse_output(raw, kind).is_success


def test_mistake_says_what_would_do_when_the_answer_is_no_choice() -> None:
    """S-LLM-52."""
    expected = "The response is no Verdict: Input should be 'yes' or 'no'"
    assert parse_output("perhaps", Verdict).error_message == expected


def test_mismatch_is_told_with_type_and_place() -> None:
    """S-OUT-21, S-OUT-23: the type's name, the field and what is wrong with it; missing and null are mismatches."""
    start = "JSON could not be deserialized as City: "
    assert parse_output('{"people": 1}', City).error_message == f"{start}'name': Field required"
    assert parse_output('{"name": null}', City).error_message == f"{start}'name': Input should be a valid string"
    assert str(parse_output("{oops}", City).error_message).startswith(f"{start}Invalid JSON")
    assert "as dict[str, int]: 'a': " in str(parse_output('{"a": "x"}', dict[str, int]).error_message)


@pytest.mark.parametrize(
    "raw",
    [
        '{"name": "Bern"}? No: {"name": "Zurich"}',
        'It is {"name": "Zurich"}, as in {"source": "atlas"} [1].',
        '```json\n{"name": "Bern"}\n```\nBetter:\n```json\n{"name": "Zurich"}\n```\n```json\n{"n": 1}\n```',
        '{"name": "Bern", "people": "many"} becomes {"name": "Zurich"} {}',
    ],
)
def test_the_last_value_that_fits_is_the_answer(raw: str) -> None:
    """S-OUT-13: not the first brace, nor a value of another form."""
    assert parse_output(raw, City).value == City(name="Zurich")


def test_a_part_of_a_broken_value_is_no_answer() -> None:
    """S-OUT-13: an answer that was cut off, or has a slip, is asked for again."""
    assert not parse_output('[{"name": "Bern"}, {"name": "Zurich"},', City).is_success
    assert not parse_output('{"name": "Bern" "next": {"name": "Zurich"}}', City).is_success
    assert not parse_output('```json\n{"name": "Bern" "next": {"name": "Zurich"}}\n```', City).is_success


def test_unknown_properties_are_ignored_unless_the_type_forbids_them() -> None:
    """S-OUT-22: by default nothing is said of them."""

    class Strict(City):
        model_config = ConfigDict(extra="forbid")

    raw = '{"name": "Bern", "canton": "BE"}'
    assert parse_output(raw, City).value == City(name="Bern")
    assert "'canton': Extra inputs are not permitted" in str(parse_output(raw, Strict).error_message)


def test_validation_is_lax_when_a_model_writes_numbers_as_text() -> None:
    """S-OUT-23: what pydantic accepts in lax mode is accepted; aliases are the names read."""

    @dataclass
    class Price:
        amount: Decimal
        pieces: int

    assert parse_output('{"amount": "1.50", "pieces": "3"}', Price).value == Price(amount=Decimal("1.50"), pieces=3)

    class Aliased(BaseModel):
        long_name: str = Field(alias="longName")

    assert parse_output('{"longName": "x"}', Aliased).value == Aliased(longName="x")


# Retries.


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A task as the machine sees it."""

    output_type: type[object] | None = City
    description: str = "Describe the city of Bern"
    max_output_retries: int = 2


def machine(first: str | None, task: Asked | None = None) -> StructuredMachine:
    """The machine after the agent's own answer."""
    return StructuredMachine(task or Asked(), agent_role="Geographer", first_response=first)


def test_no_correction_is_asked_when_the_first_answer_fits() -> None:
    """S-OUT-30, S-OUT-32: one attempt, and its object."""
    judged = machine(GOOD)
    assert judged.next_prompt() is None
    assert judged.result() == City(name="Bern", people=134)


def test_correction_tells_of_the_latest_attempt_when_one_failed() -> None:
    """S-OUT-31: parse error, previous response and schema, each time of the attempt just before."""
    judged = machine("no idea")
    first = judged.next_prompt()
    assert first is not None
    assert "no idea" in first
    assert "Could not find valid JSON in response: no idea" in first
    assert describe_schema(City) in first
    assert "ONLY valid JSON" in first
    judged.accept('{"people": 3}')
    second = judged.next_prompt()
    assert second is not None
    assert '{"people": 3}' in second
    assert "'name': Field required" in second
    assert "no idea" not in second
    judged.accept(GOOD)
    assert judged.next_prompt() is None
    assert judged.result() == City(name="Bern", people=134)


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_error_tells_of_every_attempt_when_none_fits(retries: int) -> None:
    """S-OUT-30, S-OUT-33: 1 + max_output_retries attempts, then the error with all that was tried."""
    task = Asked(description="Describe " + "x" * 100, max_output_retries=retries)
    judged = machine("bad 0", task)
    for attempt in range(1, retries + 1):
        assert judged.next_prompt() is not None
        judged.accept(f"bad {attempt}")
    assert judged.next_prompt() is None
    with pytest.raises(OutputParsingError) as failed:
        judged.result()
    error = failed.value
    assert str(error) == (
        f"Structured output parsing failed for task '{task.description[:80]}' "
        f"after {retries + 1} attempt(s). Expected type: City. Could not find valid JSON in response: bad {retries}"
    )
    assert error.raw_output == f"bad {retries}"
    assert error.output_type is City
    assert error.parse_errors == tuple(
        f"Could not find valid JSON in response: bad {attempt}" for attempt in range(retries + 1)
    )
    assert error.attempt_count == retries + 1
    assert (error.task_description, error.agent_role) == (task.description, "Geographer")
    assert isinstance(error, TaskExecutionError)


def test_error_shows_the_reason_and_the_last_answer_when_it_does_not_fit() -> None:
    """S-OUT-33: and what is wrong with an answer that was cut off; each is one line."""
    judged = machine('{"name": 5,\n "extra": 1}', Asked(description="Describe", max_output_retries=0))
    with pytest.raises(OutputParsingError) as failed:
        judged.result("The answer was cut off.")
    reason = failed.value.parse_errors[-1]
    assert str(failed.value) == (
        "Structured output parsing failed for task 'Describe' after 1 attempt(s). Expected type: City. "
        f'{reason}. Last answer: {{"name": 5, "extra": 1}}. The answer was cut off.'
    )
    assert "'name'" in reason


def test_error_shows_the_last_answer_when_the_description_contains_it() -> None:
    """S-OUT-33: only the parse error makes it superfluous."""
    judged = machine("{}", Asked(description="Describe {} or no", max_output_retries=0))
    with pytest.raises(OutputParsingError) as failed:
        judged.result()
    assert str(failed.value).endswith(". Last answer: {}")


@pytest.mark.parametrize("empty", ["", None])
def test_empty_answer_is_retried_when_a_type_is_wanted(empty: str | None) -> None:
    """S-OUT-38: a failed attempt, not an empty success, first or later."""
    judged = machine(empty)
    assert "LLM produced an empty response" in (judged.next_prompt() or "")
    judged.accept(empty)
    assert judged.next_prompt() is not None
    judged.accept(GOOD)
    assert judged.result() == City(name="Bern", people=134)


def test_log_tells_of_each_attempt_once() -> None:
    """S-OUT-36: WARN for each failed one, INFO with attempt i/n for the good one."""
    judged = machine("nothing")
    warning = "structured output not parsed on attempt 1/3: Could not find valid JSON in response: nothing"
    assert judged.log_lines() == [(logging.WARNING, f"Agent 'Geographer': {warning}")]
    judged.accept(GOOD)
    assert judged.log_lines() == [(logging.INFO, "Agent 'Geographer': structured output parsed on attempt 2/3")]
    assert judged.log_lines() == []


def test_machine_complains_when_it_is_used_out_of_turn() -> None:
    """S-OUT-30: answers beyond the last attempt, results before it, and tasks without a type are mistakes of the caller."""
    with pytest.raises(IllegalStateError, match="attempt 2 has not been answered"):
        machine("bad").result()
    with pytest.raises(IllegalStateError, match="after the last attempt"):
        machine(GOOD).accept("more")
    with pytest.raises(IllegalStateError, match="has no output_type"):
        machine(GOOD, Asked(output_type=None))
