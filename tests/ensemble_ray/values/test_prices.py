"""Prices of models: the cost of a call, rates over other rates, and the recorded form."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

from ensemble_ray import ModelPrice, TokenUsage, ValidationError
from ensemble_ray.values.prices import EMBEDDINGS, RunPrices, estimate_embeddings, read_price

PRICE = ModelPrice(
    input=2,
    output=8,
    cached_input=0.5,
    cache_write=2.5,
    above={1000: ModelPrice(input=4, cached_input=1)},
    batch=ModelPrice(input=1, output=4),
)


def cost(usage: TokenUsage, price: ModelPrice = PRICE, *, delivery: str = "") -> tuple[Decimal, Decimal]:
    """The parts of a cost."""
    found = price.estimate(usage, delivery=delivery)
    assert found is not None
    assert found.total_cost == found.input_cost + found.output_cost
    assert found.currency == "USD"
    return found.input_cost, found.output_cost


@pytest.mark.parametrize(
    ("usage", "delivery", "millionths"),
    [
        (TokenUsage(1000, 100), "", (2000, 800)),
        (TokenUsage(1000, 100, -1, 400), "", (600 * 2 + 200, 800)),
        (TokenUsage(1000, 100, -1, 400, 100), "", (500 * 2 + 200 + 250, 800)),
        (TokenUsage(1000, 100, 50, 0, 0), "", (2000, 800)),  # reasoning is part of the output
        (TokenUsage(1000, 100, -1, 1000, 500), "", (500, 800)),  # counts that exceed the input
        (TokenUsage(1001, 100, -1, 1), "", (4000 + 1, 800)),  # the whole request is longer
        (TokenUsage(1000, 100, -1, 400), "batch", (600 + 200, 400)),  # no batch rate of cached input
        (TokenUsage(0, 0), "", (0, 0)),
    ],
)
def test_cost_of_a_call(usage: TokenUsage, delivery: str, millionths: tuple[int, int]) -> None:
    """S-PRC-10, S-PRC-11."""
    assert cost(usage, delivery=delivery) == tuple(Decimal(each) / 1_000_000 for each in millionths)


def test_cached_tokens_cost_what_others_do_without_a_rate() -> None:
    """S-PRC-11."""
    assert cost(TokenUsage(1000, 0, -1, 400, 100), ModelPrice(input=2, output=8))[0] == Decimal("0.002")


def test_parts_are_rounded_half_up() -> None:
    """S-PRC-11: input once, not each of its parts."""
    price = ModelPrice(input="0.005", output="0.015", cached_input="0.005")
    assert cost(TokenUsage(1, 1), price) == (Decimal("0.00000001"), Decimal("0.00000002"))
    assert cost(TokenUsage(2, 0, -1, 1), price)[0] == Decimal("0.00000001")


@pytest.mark.parametrize("usage", [TokenUsage(), TokenUsage(5, -1), TokenUsage(-1, 5, -1, 4)])
def test_cost_is_unknown_when_tokens_are(usage: TokenUsage) -> None:
    """S-PRC-11."""
    assert PRICE.estimate(usage) is None


@pytest.mark.parametrize("given", [{"input": -1}, {"output": "x"}, {"cache_write": float("nan")}, {"input": True}])
def test_rates_that_are_none_are_refused(given: dict[str, object]) -> None:
    """S-PRC-13."""
    with pytest.raises(ValidationError, match="ModelPrice"):
        ModelPrice(**given)  # type: ignore[arg-type]  what is refused


def test_rates_replace_those_of_another_price() -> None:
    """S-PRC-13: each by itself, and those of batches too."""
    own = ModelPrice(output=9, batch=ModelPrice(output=3), source="me").over(PRICE)
    assert (own.input, own.output, own.cached_input, own.above, own.source) == (2, 9, Decimal("0.5"), PRICE.above, "me")
    assert own.batch is not None
    assert (own.batch.input, own.batch.output) == (1, 3)
    assert PRICE.over(None) == PRICE


def test_recorded_form_gives_the_same_price() -> None:
    """S-PRC-14: without what it does not have; a damaged one costs nothing known."""
    data = PRICE.to_data()
    assert data == {
        "input": "2", "output": "8", "cached_input": "0.5", "cache_write": "2.5",
        "above": {"1000": {"input": "4", "cached_input": "1"}}, "batch": {"input": "1", "output": "4"},
    }  # fmt: skip
    assert read_price(json.loads(json.dumps(data))) == PRICE
    for damaged in ({"input": "much"}, ["2"], None):
        assert read_price(damaged).estimate(TokenUsage(1, 1)) is None


def test_answers_refer_to_the_prices_of_their_run() -> None:
    """S-PRC-14: to the first, to another by its name, to none, or to one that the run did not know."""
    dear = ModelPrice(input=100, output=100)
    prices = RunPrices(decided={"b:dear": dear, "a:cheap": PRICE, EMBEDDINGS: ModelPrice(input=1, output=0)})
    usage, other = TokenUsage(1000, 0), ModelPrice(input=7, output=7).to_data()
    found = [prices.estimate(usage, mark) for mark in (None, "b:dear", "", "c:gone", other)]
    assert [None if each is None else each.total_cost * 1000 for each in found] == [2, 100, None, None, 7]
    embedded = estimate_embeddings(prices, 1000)
    assert embedded is not None
    assert embedded.total_cost == Decimal("0.001")
    assert RunPrices().estimate(usage, None) is None
    assert estimate_embeddings(RunPrices(decided={"a:cheap": PRICE}), 10) is None
    assert RunPrices.from_data(json.loads(json.dumps(prices.to_data())), {}) == prices
