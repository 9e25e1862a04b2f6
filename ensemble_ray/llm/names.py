"""Names of models and providers, of live models and of models in recorded definitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ModelNames(NamedTuple):
    """Name and provider of a model; None: unknown."""

    model: str | None = None
    provider: str | None = None


NO_NAMES = ModelNames()

#: Providers of the library's models, by class, unless their URL is another provider's.
_USUAL_PROVIDERS = {"OpenAIChatModel": "openai", "LocalChatModel": "local"}
_LIBRARY = "ensemble_ray."


def model_names(model: object) -> ModelNames:
    """Return the names under which a model's calls are shown."""
    name, other, provider = (getattr(model, each, None) for each in ("model_name", "model", "provider_name"))
    shown = next((text for text in (name, other) if isinstance(text, str) and text), None)
    return ModelNames(shown, provider if isinstance(provider, str) and provider else None)


def declared_names(model: object) -> ModelNames:
    """Return the names of a model that `recorded_names` reads from its recorded definition."""
    while (inner := getattr(model, "delegate", None)) is not None:  # a rate-limited model
        model = inner
    cls = type(model)
    provider = _USUAL_PROVIDERS.get(cls.__name__) if cls.__module__.startswith(_LIBRARY) else None
    name = getattr(model, "model_name" if provider == "local" else "model", None)
    return ModelNames(name if isinstance(name, str) and name else None, provider)


def added_names(names: ModelNames, declared: ModelNames) -> ModelNames:
    """Return the names that an answer must record beside the declared ones."""
    if names == declared:
        return NO_NAMES
    return ModelNames(*(None if own == known else own for own, known in zip(names, declared, strict=True)))


def recorded_names(llm: Mapping[str, object]) -> ModelNames:
    """Return the names of a model in a recorded definition, such as its `definition.llm` (S-FBK-41).

    Examples:
        >>> recorded_names({"class": "ensemble_ray.OpenAIChatModel", "model": "gpt-4o-mini"})
        ModelNames(model='gpt-4o-mini', provider='openai')
    """
    name, cls = llm.get("model"), llm.get("class")
    provider = None
    if isinstance(cls, str) and cls.startswith(_LIBRARY):
        provider = _USUAL_PROVIDERS.get(cls.rpartition(".")[2])
    if provider == "local":  # its recorded name is the name of a file
        return ModelNames(name.rpartition(".")[0] or name if isinstance(name, str) else "local", provider)
    return ModelNames(name if isinstance(name, str) else None, provider)
