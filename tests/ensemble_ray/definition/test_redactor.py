"""The declaration of a redactor, and the key of its runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import Ensemble, Redactor, ValidationError
from ensemble_ray.definition.redactor import describe_redaction, recorded_redaction
from ensemble_ray.teamfile import load_ensemble

KEY = "k" * 43
WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"patterns": ["mail"]}, "unknown pattern 'mail'. Known: email, phone, card, iban, key"),
    ({"patterns": []}, "has no pattern"),
    ({"patterns": 5}, "patterns must be names"),
    ({"custom": {"Case": "x"}}, "the name 'Case' must have lower-case letters"),
    ({"custom": {"email": "x"}}, "'email' is the name of a pattern of the library"),
    ({"custom": {"case": "("}}, "custom 'case': invalid regular expression"),
    ({"custom": {"case": "a*"}}, "must not match an empty text"),
    ({"custom": {"case": 5}}, "must be a regular expression or a function of a text, got: int"),
    ({"custom": ["a"]}, "custom must be a mapping"),
    ({"region": "Germany"}, "two capital letters"),
    ({"region": "XX"}, "'XX' has no phone numbers"),
    ({"key": "sk-secret key"}, "must be the name of an environment variable"),
    ({"tools": 5}, "tools must be names"),
    ({"reveal_roles": "privacy"}, "Redactor reveal_roles needs reversible=True"),
    ({"reveal_roles": 3, "reversible": True}, "Redactor reveal_roles must be names"),
)


@pytest.mark.parametrize(("arguments", "text"), WRONG)
def test_a_redactor_is_refused_when_it_is_declared_wrongly(arguments: dict[str, Any], text: str) -> None:
    """S-RED-10."""
    with pytest.raises(ValidationError) as refused:
        Redactor(**arguments)
    assert text in str(refused.value)
    assert "sk-secret" not in str(refused.value)


def test_the_extra_is_named_when_a_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-RED-11: the other patterns need no package."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValidationError, match=r"'phone', 'card', 'iban' need packages .*ensemble-ray\[redaction\]"):
        Redactor()
    assert Redactor(patterns=("email", "key")).patterns == ("email", "key")


def test_a_team_file_has_a_redactor_when_it_has_the_key_redaction(tmp_path: Path) -> None:
    """S-RED-13."""
    team = tmp_path / "team.yaml"
    team.write_text(
        "redaction:\n  patterns: [email, iban]\n  custom:\n    case: 'CASE-\\d{6}'\n    base: {function: 'finders:find'}\n"
        "  reversible: true\n  reveal_roles: privacy\nllm: local\nagents:\n  A: {goal: x}\ntasks:\n  t: {description: hi, agent: A}\n"
    )
    (tmp_path / "finders.py").write_text("def find(text):\n    return []\n")
    found = load_ensemble(team)
    assert isinstance(found, Ensemble)
    redactor = found.redactor
    assert redactor is not None
    assert redactor.reveal_roles == ("privacy",)
    assert (redactor.patterns, redactor.reversible, redactor.custom["case"]) == (("email", "iban"), True, r"CASE-\d{6}")
    assert callable(redactor.custom["base"])
    team.write_text(team.read_text().replace("email", "mail"))
    with pytest.raises(ValidationError, match="unknown pattern 'mail'"):
        load_ensemble(team)


def test_a_run_is_refused_when_its_key_is_missing_short_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-RED-41, S-RED-45."""
    redactor = Redactor(reversible=True)
    with pytest.raises(ValidationError, match="needs a key in the environment variable ENSEMBLE_RAY_REDACTION_KEY"):
        redactor.begin("r1")
    monkeypatch.setenv("ENSEMBLE_RAY_REDACTION_KEY", "short")
    with pytest.raises(ValidationError, match="at least 32 characters"):
        redactor.begin("r1")
    monkeypatch.setenv("ENSEMBLE_RAY_REDACTION_KEY", KEY)
    begun = redactor.begin("r1")
    begun.clean("bob@corp.example")
    header = describe_redaction(begun)
    assert KEY not in str(header)
    assert "bob" not in str(header)
    assert recorded_redaction(header).restore(begun.clean("bob@corp.example")) == "bob@corp.example"
    monkeypatch.setenv("ENSEMBLE_RAY_REDACTION_KEY", "w" * 43)
    for read in (lambda: redactor.begin("r1", header), lambda: recorded_redaction(header)):
        with pytest.raises(ValidationError, match="is not the one that the run was redacted with"):
            read()
    with pytest.raises(ValidationError, match="needs a record"):
        redactor.begin("r1", is_recorded=False)


def test_placeholders_are_stable_without_a_key_when_the_machine_is_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """S-RED-46: the key file of the user; another machine says which key it needs."""
    redactor = Redactor(patterns="email")
    text, header = redactor.begin("r1").clean("bob@corp.example"), describe_redaction(redactor.begin("r1"))
    assert redactor.begin("r1", header).clean("bob@corp.example") == text
    assert redactor.begin("r2").clean("bob@corp.example") != text
    monkeypatch.setenv("ENSEMBLE_RAY_HOME", str(tmp_path))
    with pytest.raises(ValidationError, match="or with the key file of the machine where it began"):
        redactor.begin("r1", header)
