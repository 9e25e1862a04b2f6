"""Names of models and providers, of live models and of models in recorded definitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast


class ModelNames(NamedTuple):
    """Name and provider of a model; None: unknown."""

    model: str | None = None
    provider: str | None = None


NO_NAMES = ModelNames()

#: Providers of the library's models, by class, unless their URL is another provider's.
_USUAL_PROVIDERS = {"OpenAIChatModel": "openai", "OpenAIResponsesModel": "openai", "LocalChatModel": "local"}
_LIBRARY = "ensemble_ray."


def model_names(model: object) -> ModelNames:
    """Return the names under which a model's calls are shown."""
    name: object = getattr(model, "model_name", None)
    if not isinstance(name, str) or not name:
        name = getattr(model, "model", None)
    provider: object = getattr(model, "provider_name", None)
    return ModelNames(
        name if isinstance(name, str) and name else None, provider if isinstance(provider, str) and provider else None
    )


def declared_names(model: object, names: ModelNames) -> ModelNames:
    """Return those of a model's `names` that `recorded_names` reads from its recorded definition."""
    # A rate-limited model, and a chain.
    while (inner := getattr(model, "delegate", None) or getattr(model, "first_model", None)) is not None:
        model = inner
    cls = type(model)
    if cls.__name__ in _USUAL_PROVIDERS and cls.__module__.startswith(_LIBRARY):
        return ModelNames(names.model, _USUAL_PROVIDERS[cls.__name__])
    name = getattr(model, "model", None)
    return ModelNames(name if isinstance(name, str) and name else None)


def added_names(names: ModelNames, declared: ModelNames) -> ModelNames:
    """Return the names that an answer must record beside the declared ones."""
    if names == declared:
        return NO_NAMES
    return ModelNames(*(None if own == known else own for own, known in zip(names, declared, strict=True)))


def recorded_names(llm: Mapping[str, object]) -> ModelNames:
    """Return the names of a model in a recorded definition, such as its `definition.llm`; of a chain, of its first model.

    Examples:
        >>> recorded_names({"class": "ensemble_ray.OpenAIChatModel", "model": "gpt-4o-mini"})
        ModelNames(model='gpt-4o-mini', provider='openai')
    """
    models = llm.get("models")  # of a chain
    if isinstance(models, list) and models and isinstance(models[0], Mapping):
        return recorded_names(cast("Mapping[str, object]", models[0]))
    name, cls = llm.get("model"), llm.get("class")
    provider = None
    if isinstance(cls, str) and cls.startswith(_LIBRARY):
        provider = _USUAL_PROVIDERS.get(cls.rpartition(".")[2])
    if provider == "local":  # its recorded name is the name of a file
        return ModelNames(name.rpartition(".")[0] or name if isinstance(name, str) else "local", provider)
    return ModelNames(name if isinstance(name, str) else None, provider)
