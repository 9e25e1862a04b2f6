"""Variables in texts."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray import PromptTemplateError, resolve_template


@pytest.mark.parametrize(
    ("template", "inputs", "resolved"),
    [
        ("{topic}", {"topic": "AI"}, "AI"),
        ("{a} and {b}", {"a": "X", "b": "Y"}, "X and Y"),
        ("{{topic}}", {"topic": "AI"}, "{topic}"),
        ("{a}{a}", {"a": "X"}, "XX"),
        ("{under_score}", {"under_score": "ok"}, "ok"),
        ("{topic}", {"topic": None}, ""),
        ("{topic}", {"topic": ""}, ""),
        ("{n}", {"n": 3}, "3"),
        ("plain", None, "plain"),
        ("plain", {"a": "X"}, "plain"),
        ("{a1}", {"a1": "X"}, "X"),
    ],
)
def test_variables_are_filled_in_when_values_are_given(
    template: str, inputs: Mapping[str, object] | None, resolved: str
) -> None:
    """S-TPL-4, S-TPL-5, S-TPL-8, S-DOM-70."""
    assert resolve_template(template, inputs) == resolved


@pytest.mark.parametrize("text", ["{}", "{a b}", "{a.b}", '{"name": "x"}', "{ a }", "{a", "a}", "{a-b}", "{ {"])
def test_braces_stay_when_they_hold_no_name(text: str) -> None:
    """S-TPL-1."""
    assert resolve_template(text, {"a": "X", "b": "Y", "name": "Z"}) == text


@pytest.mark.parametrize("text", [None, "", "  ", "\n\t"])
def test_text_is_given_back_when_it_is_blank(text: str | None) -> None:
    """S-TPL-3."""
    assert resolve_template(text, {"a": "X"}) == text


def test_escaped_name_is_text_when_a_value_exists_or_not() -> None:
    """S-TPL-2: never filled in, never missing."""
    assert resolve_template("{{a}} {{b}} {a}", {"a": "X"}) == "{a} {b} X"


def test_value_stays_as_it_is_when_it_looks_like_a_variable() -> None:
    """S-TPL-7."""
    assert resolve_template("{a} {b}", {"a": "{b}", "b": "{{a}}"}) == "{b} {{a}}"


@given(st.dictionaries(st.sampled_from("abc"), st.text(alphabet="{}abc")))
def test_a_value_never_changes_when_it_is_inserted(values: dict[str, str]) -> None:
    """S-TPL-5, S-TPL-7."""
    template = "".join(f"<{{{name}}}>" for name in values)
    assert resolve_template(template, values) == "".join(f"<{value}>" for value in values.values())


def test_all_missing_names_are_told_when_values_lack() -> None:
    """S-TPL-6: once each, in order of appearance; escaped ones are not missing."""
    template = "{b} {a} {b} {c} {{d}}"
    with pytest.raises(PromptTemplateError) as caught:
        resolve_template(template, {"c": "X"})
    assert str(caught.value) == (
        "Missing template variables: [b, a]. Provide them in ensemble.run(inputs). Template: '{b} {a} {b} {c} {{d}}'"
    )
    assert caught.value.missing_variables == ("b", "a")
    assert caught.value.template == template


def test_template_is_cut_in_the_text_when_it_is_long() -> None:
    """S-TPL-6: at 100 characters, with dots; the field holds all of it, also after pickling."""
    exact, longer = "{x}" + "y" * 97, "{x}" + "y" * 98
    for template, shown in ((exact, exact), (longer, longer[:100] + "...")):
        with pytest.raises(PromptTemplateError) as caught:
            resolve_template(template, None)
        assert str(caught.value).endswith(f"Template: '{shown}'")
        copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301  our own bytes
        assert copy.template == template


def test_missing_is_told_when_inputs_are_none() -> None:
    """S-TPL-4, S-TPL-8."""
    with pytest.raises(PromptTemplateError, match=r"^Missing template variables: \[name\]\."):
        resolve_template("Hello {name}!", None)


def test_counts_are_logged_when_a_template_is_resolved(caplog: pytest.LogCaptureFixture) -> None:
    """S-TPL-40: length and number of inputs before, number of variables after; never the texts."""
    with caplog.at_level(logging.DEBUG, logger="ensemble_ray"):
        resolve_template("{secret} {secret}", {"secret": "value", "other": "x"})
    first, second = (record.getMessage() for record in caplog.records)
    assert "17" in first
    assert "2 inputs" in first
    assert "2 variables" in second
    assert "value" not in first + second
