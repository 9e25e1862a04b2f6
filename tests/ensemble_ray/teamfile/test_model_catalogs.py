"""Models by name: those of a team's file, and those that an operator names for all teams."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

import pytest

from ensemble_ray import Fallback, MapReduceEnsemble, OpenAIChatModel, OpenAIResponsesModel, ValidationError, When
from ensemble_ray.teamfile import load_runnable
from ensemble_ray.teamfile.fields import load_model
from tests.ensemble_ray.teamfile.conftest import Load, Refused

TEAM = "tasks: {t: {description: d}}\nllm: openai:own\n"


def test_a_team_has_models_that_its_runs_can_be_told_to_ask(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-CTL-10: in the forms of `llm`, with variables."""
    monkeypatch.setenv("HOST", "10.0.0.5")
    models = "models:\n  large: openai:gpt-4o\n  house: {model: m, base_url: 'http://${HOST}/v1', temperature: 0}\n"
    team = load(TEAM + models)
    assert sorted(team.models) == ["house", "large"]
    assert repr(team.models["house"]) == repr(OpenAIChatModel("m", base_url="http://10.0.0.5/v1", temperature=0))


def test_a_model_of_the_responses_api_is_named_in_both_forms(load: Load) -> None:
    """S-RSP-1, S-RSP-6: as a text and as a mapping, whose keys are those of chat completions."""
    house = "{model: 'openai-responses:m', base_url: 'http://h/v1', max_tokens: 5, reasoning_effort: low}"
    team = load(f"tasks: {{t: {{description: d}}}}\nllm: openai-responses:own\nmodels: {{house: {house}}}\n")
    assert team.llm == OpenAIResponsesModel("own")
    assert team.models["house"] == OpenAIResponsesModel(
        "m", base_url="http://h/v1", max_tokens=5, reasoning_effort="low"
    )
    assert load_model("openai-responses:own") == team.llm


def test_a_built_in_tool_in_a_file_is_refused_with_its_place(refused: Refused) -> None:
    """S-RSP-8: before any call."""
    model = "{model: 'openai-responses:m', extra_body: {tools: [{type: web_search}]}}"
    lines = refused(f"tasks: {{t: {{description: d}}}}\nllm: {model}\n")
    assert any("the built-in tool 'web_search' cannot be used" in line and "llm" in line for line in lines)


def test_a_map_reduce_has_them_too(folder: Path) -> None:
    """S-CTL-10."""
    text = (
        "llm: openai:own\nmodels: {large: 'openai:gpt-4o'}\nmap_reduce:\n  items: [a]\n"
        "  map: {description: 'Read {item}'}\n  reduce: {description: Join}\n"
    )
    (folder / "team.yaml").write_text(text, encoding="utf-8")
    assert list(cast("MapReduceEnsemble", load_runnable("team.yaml")).models) == ["large"]


def test_what_is_no_model_is_named_with_its_place(refused: Refused) -> None:
    """S-CTL-10: everything at once."""
    lines = refused(TEAM + "models: {large: nonsense, house: {modl: m}}\n")
    assert any("models.large" in line and "nonsense" in line for line in lines)
    assert any("models.house" in line and "Did you mean 'model'?" in line for line in lines)
    assert any("must be a mapping" in line for line in refused(TEAM + "models: [openai:a]\n"))


def test_an_operators_model_is_named_as_in_a_file_or_as_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SRV-211: a text, a mapping, or module:attribute; a key comes from the environment, where it is needed alone."""
    code = "from ensemble_ray.llm.openai import OpenAIChatModel\nSMALL = OpenAIChatModel('small')\nOTHER = 5\n"
    (folder / "catalog_models.py").write_text(code, encoding="utf-8")
    assert repr(load_model("catalog_models:SMALL")) == repr(OpenAIChatModel("small"))
    assert load_model("catalog_models:SMALL") is sys.modules["catalog_models"].SMALL
    assert repr(load_model("openai:gpt-4o")) == repr(OpenAIChatModel("gpt-4o"))
    keyed = {"model": "m", "base_url": "http://127.0.0.1:9/v1", "api_key_env": "KEY_OF_THE_OPERATOR"}
    assert repr(load_model(keyed, needs_keys=False)) == repr(OpenAIChatModel("m", base_url="http://127.0.0.1:9/v1"))
    with pytest.raises(ValidationError, match="KEY_OF_THE_OPERATOR"):
        load_model(keyed)
    monkeypatch.setenv("KEY_OF_THE_OPERATOR", "k")
    load_model(keyed)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nonsense", "Unknown llm 'nonsense'"),
        ("catalog_models:MISSING", "There is no module 'catalog_models'"),
        ("os:sep", "Unknown llm"),
        ("os:path", "without a chat method"),
        ({"modl": "m"}, "Did you mean 'model'"),
        ({"model": "m", "api_key": "k"}, "a key does not belong in a file"),
        ([1], "must be one of"),
    ],
)
def test_what_names_no_model_is_refused(folder: Path, given: object, said: str) -> None:
    """S-SRV-211."""
    with pytest.raises(ValidationError, match=said):
        load_model(given)


def test_a_model_may_be_a_chain(load: Load) -> None:
    """S-FBK-50: a list, or a mapping with failures and rules; its strings are its names."""
    listed = "agents: {w: {role: Writer, goal: Write, llm: [openai:a, {model: b, temperature: 0}, local]}}\n"
    ruled = (
        "tasks: {t: {description: d, agent: w}}\nllm:\n  models: [openai:a, openai:b]\n  on: quota\n"
        "  when: [{budget_above: 0.8, use: openai:b}, {run_time_above: 60}]\n"
        "models: {two: [openai:c, openai:d]}\n"
    )
    team = load(listed + ruled)
    agent = team.tasks[0].agent
    assert agent is not None
    assert agent.llm == Fallback(["openai:a", OpenAIChatModel("b", temperature=0), "local"])
    rules = [When(budget_above=0.8, use="openai:b"), When(run_time_above=60)]
    assert team.llm == Fallback(["openai:a", "openai:b"], on="quota", when=rules)
    assert team.models["two"] == Fallback(["openai:c", "openai:d"])


def test_what_is_wrong_in_a_chain_is_named_with_its_place(refused: Refused) -> None:
    """S-FBK-50, S-FBK-20: everything at once; a model inside a list is no list."""
    chain = "tasks: {t: {description: d}}\nllm: {models: [openai:a, opnai:b, [local]], on: [quoat], when: {budget_abov: 1}}\n"
    lines = refused(chain)
    assert any("llm.models[1]" in line and "Unknown llm 'opnai:b'" in line for line in lines)
    assert any("llm.models[2]" in line and "must be one of" in line for line in lines)
    assert any("llm.on[0]" in line and "Did you mean 'quota'?" in line for line in lines)
    assert any("llm.when" in line and "Did you mean 'budget_above'?" in line for line in lines)
    wrong = "tasks: {t: {description: d}}\nllm: {models: [openai:a], when: {budget_above: 2}}\n"
    assert any("budget_above must be a number from 0 to below 1" in line for line in refused(wrong))
    unknown = "tasks: {t: {description: d}}\nllm: {models: [openai:a], when: {budget_above: 0.5, use: z}}\n"
    assert any("the chain has no model 'z'" in line for line in refused(unknown))
