"""What a record tells of a run's budget: what is spent, what was allowed, with what it goes on."""

from __future__ import annotations

from decimal import Decimal

import pytest

from ensemble_ray import CostConfiguration, RunOptions, ValidationError
from ensemble_ray.execute.orders import RunContext
from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.resume.reading import check_larger, options_again, recorded_budget
from ensemble_ray.record.totals import UsageTally
from ensemble_ray.runs.planned import with_account
from ensemble_ray.values.metrics import Amount, RunBudget
from tests.ensemble_ray.record.facts_of_runs import begun, completed, fact, node, output, spent_of

READ = node("read", "Read Ray")


def answer(name: str, at: float, tokens: tuple[int, int], **more: object) -> Fact:
    """A recorded answer."""
    return fact("model", name, at, text="y" * 40, input_tokens=tokens[0], output_tokens=tokens[1], **more)


def test_recorded_answers_are_what_was_spent() -> None:
    """S-BUD-6, S-BUD-7: those of every task, of handed on work and of a synthesizer; nothing else."""
    facts = [
        *begun(READ),
        answer("read#0/0/synthesis", 1, (1, 2)),
        answer("read#0/0/model", 2, (10, 20)),
        answer("read#0/0/call-0/delegate#0/0/model", 3, (100, 200)),
        *completed("read", output("Read Ray", "x"), 105),
    ]
    assert spent_of(facts, None) == Amount(333)


def test_what_memory_embedded_was_spent() -> None:
    """S-MEM-129: as input tokens."""
    facts = [
        fact("memory_recalled", "read#0/0/memory", 1, embedding_tokens=7),
        fact("memory_stored", "read#0/0/memory", 2, embedding_tokens=5),
        fact("memory_recalled", "write#0/0/memory", 3),
    ]
    costs = CostConfiguration(input_token_rate=Decimal("0.1"), output_token_rate=Decimal("0.2"))
    assert spent_of(facts, costs) == Amount(12, 12 * 10**7)


def test_money_is_counted_as_the_costs_say() -> None:
    """S-BUD-10."""
    costs = CostConfiguration(input_token_rate=Decimal("0.1"), output_token_rate=Decimal("0.2"))
    assert spent_of([answer("a#0/0/model", 1, (10, 20))], costs) == Amount(30, 5 * 10**8)


def test_answer_without_counts_is_what_was_estimated() -> None:
    """S-BUD-2: as the budget estimated it then; where there was none, as its text is long."""
    assert spent_of([answer("a#0/0/model", 1, (-1, -1), estimated_tokens=[7, 5])], None) == Amount(12)
    assert spent_of([answer("a#0/0/model", 1, (9, -1), estimated_tokens=[9, 5])], None) == Amount(14)
    assert spent_of([answer("a#0/0/model", 1, (-1, -1))], None) == Amount(10)


def test_answers_of_another_run_are_not_counted() -> None:
    """S-BUD-9: a fork has a budget of its own."""
    assert spent_of([answer("a#0/0/model", 1, (9, 9), is_copied=True)], None) == Amount(0)


def test_call_that_is_noted_twice_is_counted_once() -> None:
    """S-BUD-9: who goes on notes again what was asked before the run began; several calls of one name are several."""
    facts = [answer("a#0/0/synthesis", at, (1, 1)) for at in (1, 2, 1)]
    assert spent_of(facts, None) == Amount(4)
    tally = UsageTally()
    for each in facts:  # page by page
        tally.apply_all([each])
    assert tally.spent == Amount(4)


def test_owner_of_a_run_opens_an_account_of_its_own() -> None:
    """S-BUD-6, S-BUD-8: with what is spent; a run without a budget has none."""
    context = RunContext(run_id="r", workflow="sequential", total_tasks=1, budget=RunBudget(max_tokens=100))
    one, two = (with_account(context, Amount(18)).budget for _ in range(2))
    assert one is not None
    assert two is not None
    assert (one.max_tokens, one.spent) == (100, Amount(18))
    assert one.account != two.account
    plain = RunContext(run_id="r", workflow="sequential", total_tasks=1)
    assert with_account(plain, Amount(18)) is plain


def test_last_budget_and_last_options_hold_when_a_run_goes_on_again() -> None:
    """S-BUD-6: a restart of a scheduler changes neither; what is chosen now wins."""
    facts = begun(READ, options={"max_tokens": 5, "max_parallel_tasks": 2}, budget={"max_tokens": 5, "max_cost": None})
    again = {"options": {"max_tokens": 9}, "budget": {"max_tokens": 9, "max_cost": None}}
    facts += [fact("resume", "run", 200, is_restart=False, **again), fact("resume", "run", 201, is_restart=True)]
    assert recorded_budget(facts) == RunBudget(max_tokens=9)
    assert options_again(facts, None) == RunOptions(max_tokens=9)
    assert options_again(facts, RunOptions(max_tokens=20, durability="run")).max_tokens == 20
    assert recorded_budget(begun(READ)) is None


def test_run_that_spent_its_budget_needs_a_larger_one() -> None:
    """S-BUD-6: which also covers what was spent."""
    before, spent = RunBudget(max_tokens=100), Amount(90)
    for now in (None, RunBudget(max_tokens=200), RunBudget(max_cost=1)):
        check_larger("r", "", before, now, spent)
    told = r"Run 'r' spent its budget \(max_tokens 100\): 90 tokens are spent\. Go on with a larger one: "
    told += r"ensemble_ray\.resume\('r', ensemble, max_tokens=N\), in the program"
    for now in (before, RunBudget(max_tokens=50)):
        with pytest.raises(ValidationError, match=told):
            check_larger("r", "", before, now, spent)
    with pytest.raises(ValidationError, match="102 tokens are spent"):
        check_larger("r", "", before, RunBudget(max_tokens=101), Amount(102))
