"""From `llm="..."` to a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import LocalChatModel, OpenAIChatModel, OpenAIResponsesModel, ValidationError
from ensemble_ray.llm.factory import resolve_llm
from ensemble_ray.testing import ScriptedModel


def test_a_model_is_made_when_the_string_names_one() -> None:
    """S-CONV-19: `openai:` means the protocol, `local` the embedded model, `local:PATH` a file."""
    assert resolve_llm("openai:gpt-4o-mini") == OpenAIChatModel("gpt-4o-mini")
    assert resolve_llm("openai:org/model:free") == OpenAIChatModel("org/model:free")
    assert resolve_llm("local") == LocalChatModel()
    local = resolve_llm("local:models/tiny.gguf")
    assert isinstance(local, LocalChatModel)
    assert local.path == Path("models/tiny.gguf").resolve()


def test_a_model_of_the_responses_api_is_named_by_its_prefix() -> None:
    """S-RSP-1, S-CONV-19: it is shared by its name, and no other model than this."""
    model = resolve_llm(" openai-responses: gpt-5 ")
    assert model == OpenAIResponsesModel("gpt-5")
    assert resolve_llm("openai-responses:gpt-5") is model
    assert model != resolve_llm("openai:gpt-5")


def test_a_model_is_taken_as_it_is_when_given_as_an_object() -> None:
    """S-CONV-19, S-CONV-20: anything with a `chat` method."""
    model = ScriptedModel("x")
    assert resolve_llm(model) is model


@pytest.mark.parametrize("value", ["anthropic:claude", "", "openai:", "openai", "openai-responses:", "local:", "Local"])
def test_known_forms_are_listed_when_the_prefix_is_unknown(value: str) -> None:
    """S-CONV-19: an unknown prefix names the known ones."""
    with pytest.raises(ValidationError) as caught:
        resolve_llm(value)
    assert (
        str(caught.value)
        == f"Unknown llm '{value}'. Known: [openai:MODEL, openai-responses:MODEL, local, local:PATH.gguf]"
    )


@pytest.mark.parametrize("value", ["gpt-4o", "o3", "meta/llama-3"])
def test_a_prefix_is_proposed_when_only_a_model_is_named(value: str) -> None:
    """S-CONV-19: what most users meant."""
    with pytest.raises(ValidationError, match=f"Unknown llm '{value}'. Did you mean 'openai:{value}'\\? Known: "):
        resolve_llm(value)


@pytest.mark.parametrize("value", [3, object(), ScriptedModel])
def test_an_object_is_refused_when_it_cannot_chat(value: object) -> None:
    """S-CONV-20: a chat model has a `chat` method; its class is no model."""
    with pytest.raises(ValidationError, match="llm must be a chat model or one of"):
        resolve_llm(value)
