"""Output types of JSON schemas: what is checked, and what is refused before any model call."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import pytest

from ensemble_ray import Ensemble, Task, ValidationError
from ensemble_ray.execute.agent.answer_schema import answer_schema
from ensemble_ray.execute.agent.structured import parse_output
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.values.output_schema import output_type_of, schema_in

REPORT: dict[str, Any] = {
    "$defs": {"count": {"type": "integer", "minimum": 1}},
    "title": "Report",
    "type": "object",
    "properties": {"count": {"$ref": "#/$defs/count"}, "code": {"type": "string", "pattern": "^x[0-9]+$"}},
    "required": ["count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ('So: {"count": 2, "code": "x1"}', None),
        ('{"count": 0}', "'count': 0 is less than the minimum of 1"),
        ('{"count": 1, "code": "y"}', "'code': does not match '^x[0-9]+$'"),
        ('{"count": 1, "more": 1}', "Additional properties are not allowed"),
        ("{}", "'count' is a required property"),
        ('{"count": NaN}', "NaN and Infinity"),
        ("none", "Could not find valid JSON"),
    ],
)
def test_an_answer_is_checked_when_it_is_parsed(answer: str, why: str | None) -> None:
    """S-REQ-30, S-REQ-33: with the mistakes and their places."""
    found = parse_output(answer, output_type_of(REPORT))
    assert found.is_success is (why is None)
    assert (why or "") in (found.error_message or "")


@pytest.mark.parametrize(
    ("schema", "answer", "value"),
    [
        ({"type": "string", "enum": ["yes", "no"]}, "Yes.", "yes"),
        ({"type": "integer"}, "7", 7),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({"type": ["object", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "object"}]}, '{"a": 1}', {"a": 1}),
    ],
)
def test_values_of_any_kind_are_read_when_the_schema_allows_them(
    schema: dict[str, Any], answer: str, value: object
) -> None:
    """S-REQ-30."""
    found = parse_output(answer, output_type_of(schema))
    assert (found.is_success, found.value) == (True, value)


def test_the_type_is_equal_to_its_copy_when_it_travels() -> None:
    """S-REQ-30: between processes."""
    output_type = output_type_of(REPORT)
    copy = pickle.loads(cloudpickle.dumps(output_type))  # noqa: S301  our own bytes
    assert copy == output_type
    assert hash(copy) == hash(output_type)
    assert schema_in(copy) is not None
    assert schema_in(dict[str, int]) is None


def test_providers_receive_the_schema_when_they_can_enforce_it() -> None:
    """S-REQ-30, S-OUT-46: by the path of declared types."""
    whole = answer_schema(output_type_of({**REPORT, "required": ["count", "code"]}))
    assert whole is not None
    assert (whole.name, whole.strict) == ("Report", True)
    assert whole.schema["properties"]["count"] == {"type": "integer"}
    assert answer_schema(output_type_of({"type": "array"})) is None


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "https://example.org/schema"}, "a reference must begin with '#/$defs/'"),
        ({"$ref": "#/$defs/gone"}, "has no '#/$defs/gone'"),
        ({"properties": {"inner": {"$ref": "#"}}}, "contains itself"),
        ({"properties": {"kind": {"type": "strin"}}}, "output_schema.properties.kind.type"),
        ({"properties": {"kind": 3}}, "output_schema.properties.kind: a schema must be an object"),
        ({"pattern": "(?=a)"}, "linear time"),
        ({"pattern": "a" * 501}, "500 characters"),
        ({"patternProperties": {}}, "cannot have the keyword 'patternProperties'"),
        ({"description": "a" * 20_001}, "20,000 characters"),
        ({"properties": {str(n): {} for n in range(1001)}}, "1,000 nested schemas"),
    ],
)
def test_a_schema_is_refused_when_it_cannot_be_checked(schema: dict[str, Any], said: str) -> None:
    """S-REQ-32."""
    with pytest.raises(ValidationError) as refused:
        output_type_of(schema)
    assert said in str(refused.value)


def test_a_schema_is_refused_when_it_is_too_deep() -> None:
    """S-REQ-32: also by references, which would double it at each level."""
    deep: dict[str, Any] = {}
    for _ in range(17):
        deep = {"items": deep}
    twice = {f"l{n}": {"anyOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 2} for n in range(14)}
    for schema in (deep, {"$ref": "#/$defs/l0", "$defs": {**twice, "l14": {}}}):
        with pytest.raises(ValidationError, match=r"levels at most|nested schemas at most"):
            output_type_of(schema)


def test_words_beside_a_reference_are_kept_when_it_is_resolved() -> None:
    """S-REQ-32: the words win; other keywords apply as well."""
    named = {"$ref": "#/$defs/n", "description": "how many", "$defs": {"n": {"type": "integer", "description": "n"}}}
    found = schema_in(output_type_of(named))
    assert found is not None
    assert found.schema == {"type": "integer", "description": "how many"}
    both = output_type_of({"$ref": "#/$defs/n", "maximum": 3, "$defs": {"n": {"type": "integer"}}})
    assert parse_output("2", both).is_success
    assert not parse_output("4", both).is_success


def test_the_model_is_asked_again_when_its_answer_does_not_fit(home: str) -> None:
    """S-REQ-30, S-OUT-1, S-OUT-31: the prompt has the schema, and the correction the mistake."""
    model = ScriptedModel('{"count": 0}', '{"count": 3}')
    task = Task("Count", "A report", output_type=output_type_of(REPORT))
    output = Ensemble(tasks=[task], llm=model).run(runtime="inline")
    first, second = model.calls
    assert '"minimum": 1' in first.text
    assert "0 is less than the minimum of 1" in second.text
    assert output[task].parsed == {"count": 3}
