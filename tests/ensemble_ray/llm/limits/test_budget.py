"""The budget machine: who goes, who waits, who is refused; and the same played with at random."""

from dataclasses import dataclass, field
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ray import CostConfiguration, IllegalStateError
from ensemble_ray.llm.limits.breaker import Budget, Proceed, Refuse
from ensemble_ray.values.metrics import NOTHING, Amount, RunBudget, price

#: Seeded and without a store of examples, so that a run gives the same everywhere.
SEEDED = settings(max_examples=60)


def tokens(count: int) -> Amount:
    """So many tokens, at no cost."""
    return Amount(count)


def budget_of(max_tokens: int, spent: int = 0) -> Budget:
    """A budget of tokens."""
    return Budget(RunBudget(max_tokens=max_tokens, spent=tokens(spent)))


def test_request_goes_when_its_estimate_fits() -> None:
    """S-BUD-2, S-BUD-3: it is reserved; the last token may be used."""
    budget = budget_of(100)
    assert budget.ask("a", tokens(60)) == [Proceed("a")]
    assert budget.ask("b", tokens(40)) == [Proceed("b")]
    assert (budget.reserved, budget.spent) == (tokens(100), NOTHING)


def test_requests_wait_in_order_when_the_first_does_not_fit() -> None:
    """S-BUD-3: a small one does not pass a large one."""
    budget = budget_of(100)
    budget.ask("a", tokens(60))
    assert budget.ask("large", tokens(50)) == []
    assert budget.ask("small", tokens(10)) == []
    assert budget.waiting == ("large", "small")
    assert budget.charge("a", tokens(30)) == [Proceed("large"), Proceed("small")]
    assert (budget.spent, budget.reserved) == (tokens(30), tokens(60))


def test_budget_is_exhausted_when_nothing_is_in_flight_and_a_request_does_not_fit() -> None:
    """S-BUD-3: then everybody is refused, now and later, also where it would fit."""
    budget = budget_of(100)
    budget.ask("a", tokens(60))
    budget.ask("b", tokens(50))
    budget.ask("c", tokens(1))
    assert budget.charge("a", tokens(80)) == [Refuse("b", tokens(50)), Refuse("c", tokens(1))]
    assert budget.is_exhausted
    assert budget.ask("d", tokens(1)) == [Refuse("d", tokens(1))]


def test_first_request_is_refused_when_it_exceeds_the_whole_budget() -> None:
    """S-BUD-3: nobody's real count could make room."""
    assert budget_of(100).ask("a", tokens(101)) == [Refuse("a", tokens(101))]


def test_reservation_is_given_back_when_a_request_failed() -> None:
    """S-BUD-2: it cost nothing."""
    budget = budget_of(100)
    budget.ask("a", tokens(100))
    budget.ask("b", tokens(100))
    assert budget.charge("a") == [Proceed("b")]
    assert budget.spent == NOTHING


def test_waiter_that_leaves_lets_the_next_one_go() -> None:
    """S-BUD-3: it is no more in anybody's way."""
    budget = budget_of(100)
    budget.ask("a", tokens(60))
    budget.ask("large", tokens(50))
    budget.ask("small", tokens(40))
    assert budget.charge("large") == [Proceed("small")]


def test_reservations_are_free_when_their_process_is_gone() -> None:
    """S-BUD-8: what it had spent stays spent, what it waited for is forgotten."""
    budget = budget_of(100)
    budget.ask("a", tokens(30), "one")
    budget.charge("a", tokens(20))
    budget.ask("b", tokens(80), "one")
    budget.ask("c", tokens(80), "one")
    budget.ask("d", tokens(70), "two")
    assert budget.release("one") == [Proceed("d")]
    assert (budget.spent, budget.in_flight) == (tokens(20), ("d",))


def test_request_that_is_asked_for_twice_is_reserved_once() -> None:
    """S-BUD-8: a message may come again."""
    budget = budget_of(100)
    assert budget.ask("a", tokens(60)) == budget.ask("a", tokens(60)) == [Proceed("a")]
    assert budget.ask("b", tokens(60)) == budget.ask("b", tokens(60)) == []
    assert (budget.reserved, budget.waiting) == (tokens(60), ("b",))


def test_what_was_spent_before_counts() -> None:
    """S-BUD-6: of a run that goes on."""
    budget = budget_of(100, spent=90)
    assert budget.ask("a", tokens(10)) == [Proceed("a")]
    assert budget_of(100, spent=90).ask("a", tokens(11)) == [Refuse("a", tokens(11))]


def test_money_and_tokens_are_limited_each_by_itself() -> None:
    """S-BUD-3: what does not fit into one of them does not go."""
    limit = RunBudget(max_tokens=100, max_cost=100)
    assert Budget(limit).ask("a", Amount(100, 101)) == [Refuse("a", Amount(100, 101))]
    assert Budget(limit).ask("a", Amount(101, 100)) == [Refuse("a", Amount(101, 100))]
    assert Budget(limit).ask("a", Amount(100, 100)) == [Proceed("a")]


def test_what_is_in_flight_elsewhere_is_taken_over_whether_it_fits_or_not() -> None:
    """S-BUD-8: an account that is rebuilt."""
    budget = budget_of(100)
    budget.restate(tokens(70), {"a": tokens(40)}, "one")
    assert budget.ask("b", tokens(20), "two") == []
    assert budget.charge("a", tokens(5)) == [Proceed("b")]


@pytest.mark.parametrize(
    ("max_tokens", "max_cost", "expected"),
    [
        (None, None, None),
        (5, None, RunBudget(max_tokens=5)),
        (None, 0.1, RunBudget(max_cost=10_000_000)),
        (5, 2.0, RunBudget(max_tokens=5, max_cost=200_000_000)),
    ],
)
def test_budget_is_what_a_user_wrote(max_tokens: int | None, max_cost: float | None, expected: object) -> None:
    """S-BUD-1, S-BUD-10: money in whole units, so that sums are exact."""
    assert RunBudget.of(max_tokens, max_cost) == expected


def test_price_is_that_of_the_cost_configuration() -> None:
    """S-BUD-10: rounded as estimates of cost are."""
    costs = CostConfiguration(input_token_rate=Decimal("0.0000015"), output_token_rate=Decimal("0.000002"))
    assert price(costs, 3, 5) == Amount(8, 450 + 1000)
    assert price(None, 3, 5) == Amount(8, 0)


@pytest.mark.parametrize(
    ("now", "before", "expected"),
    [
        (RunBudget(max_tokens=2), RunBudget(max_tokens=1), True),
        (RunBudget(max_tokens=1), RunBudget(max_tokens=1), False),
        (RunBudget(max_cost=1), RunBudget(max_tokens=1), True),
        (RunBudget(max_tokens=1, max_cost=3), RunBudget(max_tokens=1, max_cost=2), True),
        (RunBudget(max_tokens=1, max_cost=1), RunBudget(max_cost=1), False),
    ],
)
def test_larger_budget_is_told_from_a_smaller_one(now: RunBudget, before: RunBudget, expected: bool) -> None:  # noqa: FBT001  a case of the table
    """S-BUD-6: a limit that is lifted is larger, one that is added is not."""
    assert now.allows_more(before) is expected


def test_budget_is_told_in_words() -> None:
    """S-BUD-4: of both limits, each only where it is set."""
    both = RunBudget(max_tokens=100, max_cost=250_000_000)
    assert (both.describe_limits(), both.describe(Amount(90, 50_000_000))) == (
        "max_tokens 100 and max_cost 2.5",
        "90 tokens and a cost of 0.5",
    )
    assert RunBudget(max_tokens=100).describe(Amount(90, 5)) == "90 tokens"


def test_invariants_are_watched() -> None:
    """The check of the other tests finds what is wrong."""
    budget = budget_of(100)
    budget.ask("a", tokens(60))
    budget.reserved = tokens(1)
    with pytest.raises(IllegalStateError, match="reserved amounts are miscounted"):
        budget.validate()


# At random.


@dataclass(kw_only=True)
class Play:
    """Requests of some processes against one budget; real counts are within their estimates, unless they are not."""

    limit: int
    budget: Budget
    estimates: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    went: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    left: set[str] = field(default_factory=set)

    def heard(self, verdicts: list[Proceed | Refuse]) -> None:
        was_exhausted = bool(self.refused)
        for verdict in verdicts:
            (self.went if isinstance(verdict, Proceed) else self.refused).append(verdict.claim)
        if self.refused and not was_exhausted:
            # Nothing was in flight, and the first that waited did not fit.
            assert not self.budget.in_flight
            assert self.budget.spent.tokens + self.estimates[self.refused[0]] > self.limit
        self.budget.validate()


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 60), st.sampled_from("xyz")),
        st.tuples(st.just("charge"), st.integers(0, 9), st.integers(0, 100)),
        st.tuples(st.just("fail"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("leave"), st.just(0), st.sampled_from("xyz")),
    ),
    max_size=60,
)


def _played(limit: int, steps: list[tuple[str, int, object]]) -> Play:
    play = Play(limit=limit, budget=budget_of(limit))
    budget = play.budget
    for kind, number, more in steps:
        if kind == "ask":
            name = str(len(play.asked))
            play.asked.append(name)
            play.estimates[name] = number
            play.heard(budget.ask(name, tokens(number), str(more)))
        elif kind == "leave":
            play.left |= set(budget.waiting)
            play.heard(budget.release(str(more)))
            play.left -= {*budget.waiting, *play.went, *play.refused}
        elif budget.in_flight:
            claim = budget.in_flight[number % len(budget.in_flight)]
            real = 0 if kind == "fail" or not isinstance(more, int) else play.estimates[claim] * more // 100
            play.heard(budget.charge(claim, tokens(real)))
    return play


@pytest.mark.heavy
@SEEDED
@given(st.integers(1, 200), _steps)
def test_limit_holds_when_real_counts_are_within_their_estimates(
    limit: int, steps: list[tuple[str, int, object]]
) -> None:
    """S-BUD-5: whatever comes."""
    play = _played(limit, steps)
    assert play.budget.spent.tokens + play.budget.reserved.tokens <= limit


@pytest.mark.heavy
@SEEDED
@given(st.integers(1, 200), _steps)
def test_order_holds_and_nobody_starves(limit: int, steps: list[tuple[str, int, object]]) -> None:
    """S-BUD-3: first come first served; when all requests in flight are over, nobody waits any more."""
    play = _played(limit, steps)
    assert play.went == sorted(play.went, key=int)
    while play.budget.in_flight:
        play.heard(play.budget.charge(play.budget.in_flight[0], NOTHING))
    assert not play.budget.waiting
    assert sorted([*play.went, *play.refused, *play.left], key=int) == play.asked
    assert play.went == sorted(play.went, key=int)
