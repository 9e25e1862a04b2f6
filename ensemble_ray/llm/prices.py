"""Prices of models from `genai-prices`, which brings its data. It is imported for the first model at a public endpoint."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ensemble_ray.errors import ValidationError
from ensemble_ray.llm.names import model_names
from ensemble_ray.values.prices import (
    EMBEDDINGS,
    GivenPrice,
    ModelPrice,
    PriceMark,
    RunCosts,
    RunPrices,
    price_key,
)

if TYPE_CHECKING:
    from genai_prices.types import ModelPrice as LibraryPrice
    from genai_prices.types import TieredPrices

_KEYS = {
    "input": "input_mtok",
    "output": "output_mtok",
    "cached_input": "cache_read_mtok",
    "cache_write": "cache_write_mtok",
}
_BATCH = {"processing": "batch"}
_MOST_MARKS = 256
#: by the ids of prices and model, which each entry keeps alive, so that the ids stay theirs
_marks: dict[tuple[int, int], tuple[RunPrices, object, PriceMark]] = {}
_HOUR_S = 3600  # prices that depend on the time of day change at most so often


def price_mark(costs: RunCosts, model: object) -> PriceMark:
    """Return how answers of a model refer to its price. A model that was unknown at the start brings it (S-PRC-14)."""
    if not isinstance(costs, RunPrices):
        return None
    known = _marks.get((id(costs), id(model)))
    if known is None:
        if len(_marks) >= _MOST_MARKS:
            _marks.clear()
        known = _marks[id(costs), id(model)] = (costs, model, _new_mark(costs, model))
    return known[2]


def _new_mark(costs: RunPrices, model: object) -> PriceMark:
    key = _key_of(model)
    if key in costs.decided:
        return None if key == costs.first else key
    price = price_of(costs, model)
    return price.to_data() if price is not None else "" if costs.first else None


def describe_model(model: object) -> str:
    """Return the name of a model and its provider, for messages."""
    name, provider = model_names(model)
    if not name:
        return f"a {type(model).__name__} without a name"
    return f"'{name}' at '{provider}'" if provider else f"'{name}'"


def describe_unpriced(model: object) -> str:
    """Return what to do about a model of unknown price, for messages."""
    return (
        f"Set prices={{'{model_names(model).model or 'MODEL'}': ModelPrice(input=..., output=...)}}, in USD per million "
        "tokens, or cost_configuration, or limit tokens with max_tokens"
    )


def price_of(prices: RunPrices, model: object) -> ModelPrice | None:
    """Return the price of a model: the run's decided one, else what the user gave, over the library's. None: unknown."""
    price = prices.decided.get(_key_of(model)) or _price(prices, model)
    return price if price is not None and price.is_complete else None


def _price(prices: RunPrices, model: object) -> ModelPrice | None:
    name, provider = model_names(model)
    given = prices.given.get(_key_of(model)) or prices.given.get(name or "")
    if isinstance(given, str):
        found = named_price(given)
    elif provider == "local":
        found = ModelPrice(input=0, output=0, source="local")
    else:
        found = url_price(name or "", _url_of(model))
    return given.over(found) if isinstance(given, ModelPrice) else found


def embedding_price(prices: RunPrices, model: object) -> ModelPrice | None:
    """Return the price of an embedding model, which has no output; None: unknown."""
    found = _price(prices, model)
    return None if found is None or found.input is None else ModelPrice(output=0).over(found)


def needs_library(given: Mapping[str, GivenPrice], model: object) -> bool:
    """Return whether the price of a model may be looked up in the library."""
    return _is_public(_url_of(model)) or any(isinstance(price, str) for price in given.values())


def load_library() -> None:
    """Import the library with its data, which takes 0.1 s."""
    import_module("genai_prices.data")


def decide_prices(prices: RunPrices, models: Iterable[object], embedding: Sequence[object] = ()) -> RunPrices:
    """Return the prices with those of more models, as far as they are known; of several embedding models, of none."""
    found = dict(prices.decided)
    for model in models:
        if (price := price_of(prices, model)) is not None:
            found[_key_of(model)] = price
    embeds = {_key_of(model): embedding_price(prices, model) for model in embedding}
    if len(embeds) == 1 and (price := next(iter(embeds.values()))) is not None:
        found[EMBEDDINGS] = price
    return RunPrices(decided=found, given=prices.given)


def check_given(prices: RunPrices, models: Iterable[tuple[str, object]]) -> None:
    """Check that names of other models are known, and that no model has half a price (S-PRC-13)."""
    for name, price in prices.given.items():
        if isinstance(price, str) and named_price(price) is None:
            raise ValidationError(
                f"Ensemble prices: '{name}' has the price of '{price}', which {source_of_prices()} does not have. Name a "
                "model as PROVIDER:MODEL, such as 'openai:gpt-5', or give ModelPrice(input=..., output=...)"
            )
    for place, model in models if prices.given else ():
        found = _price(prices, model)
        if found is not None and not found.is_complete:
            missing = "input" if found.input is None else "output"
            raise ValidationError(
                f"Ensemble prices: the price of {describe_model(model)} ({place}) has no rate of {missing}, and "
                f"{source_of_prices()} does not have the model. Give ModelPrice(input=..., output=...)"
            )


def named_price(name: str) -> ModelPrice | None:
    """Return the library's price of a model named `PROVIDER:MODEL`; None: it has none."""
    provider, _, model = name.partition(":")
    return _library_price(model, provider, "", int(time.time() // _HOUR_S)) if model else None


def url_price(model: str, url: str) -> ModelPrice | None:
    """Return the library's price of a model at an endpoint; None: it has none."""
    return _library_price(model, "", url, int(time.time() // _HOUR_S)) if model and _is_public(url) else None


def price_lines(price: ModelPrice) -> list[str]:
    """Return a price as lines of text."""
    rows = [("", price), *((f", above {start:,} tokens of input", each) for start, each in price.above.items())]
    if price.batch is not None:
        batch = price.batch
        rows += [(", batch", batch)]
        rows += [(f", batch, above {start:,} tokens of input", each) for start, each in batch.above.items()]
    lines = [
        f"{rate:>10f}  {name.replace('_', ' ')}{where}"
        for where, rates in rows
        for name in _KEYS
        if (rate := getattr(rates, name)) is not None
    ]
    return [*lines, f"USD per million tokens; source: {price.source}"]


def source_of_prices() -> str:
    """Return the name and version of the library."""
    from importlib.metadata import version

    return f"genai-prices {version('genai-prices')}"


def _key_of(model: object) -> str:
    name, provider = model_names(model)
    return price_key(provider, name)


def _url_of(model: object) -> str:
    while (inner := getattr(model, "delegate", None)) is not None:  # a rate-limited model
        model = inner
    try:
        url = getattr(model, "base_url", "")
    except ValidationError:  # the call raises it
        return ""
    return url if isinstance(url, str) else ""


@lru_cache(maxsize=256)
def _is_public(url: str) -> bool:
    """Whether the endpoint may be a known provider's: servers of one's own need no look into the library."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    return parts.scheme == "https" and "." in host and not host.replace(".", "").isdecimal()


@lru_cache(maxsize=1024)
def _library_price(model: str, provider: str, url: str, hour: int) -> ModelPrice | None:
    at = datetime.fromtimestamp(hour * _HOUR_S, UTC)
    try:
        standard, batch = (_ask_library(model, provider, url, at, context) for context in (None, _BATCH))
    except LookupError:
        return None
    price = _converted(standard, source_of_prices())
    return price if batch == standard else price.over(ModelPrice(batch=_converted(batch)))


def _ask_library(model: str, provider: str, url: str, at: datetime, context: Mapping[str, str] | None) -> LibraryPrice:
    """Return rates of the library. A `LookupError`: it does not have the model."""
    from genai_prices import Usage, calc_price

    if provider:
        found = calc_price(Usage(), model, provider_id=provider, genai_request_timestamp=at, price_context=context)
    else:
        found = calc_price(Usage(), model, provider_api_url=url, genai_request_timestamp=at, price_context=context)
    return found.model_price


def _converted(found: LibraryPrice, source: str = "") -> ModelPrice:
    values: dict[str, Decimal | TieredPrices | None] = {name: getattr(found, key) for name, key in _KEYS.items()}
    starts = sorted({tier.start for value in values.values() for tier in getattr(value, "tiers", ())})
    above = {start: ModelPrice(**_rates_at(values, start + 1)) for start in starts}
    return ModelPrice(**_rates_at(values, 0), above=above, source=source)


def _rates_at(values: Mapping[str, Decimal | TieredPrices | None], input_tokens: int) -> dict[str, Any]:
    return {name: _rate_at(value, input_tokens) for name, value in values.items()}


def _rate_at(value: Decimal | TieredPrices | None, input_tokens: int) -> Decimal | None:
    if value is None or isinstance(value, Decimal):
        return value
    rate = value.base
    for tier in value.tiers:
        if input_tokens > tier.start:
            rate = tier.price
    return rate
