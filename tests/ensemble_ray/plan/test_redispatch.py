"""What becomes of the orders of a process that died, and which reports count."""

from __future__ import annotations

from ensemble_ray.plan.placement import MOST_DEATHS, DispatchTable, RedispatchDecision
from ensemble_ray.values.ids import REDISPATCH_STEP


def table_of(*instances: str, is_recorded: bool = True) -> DispatchTable:
    """Orders that one process has."""
    table = DispatchTable(is_recorded=is_recorded)
    for instance in instances:
        table.record_dispatch(instance, 0, "first")
    return table


def test_order_goes_on_elsewhere_under_a_higher_epoch_when_its_process_died() -> None:
    """S-DUR-31, S-DUR-16: those of other processes stay; a death that is heard of again changes nothing."""
    table = table_of("a", "b")
    table.record_dispatch("c", 0, "second")
    assert table.mark_lost("first") == RedispatchDecision(["a", "b"], [])
    for instance in "ab":
        table.record_dispatch(instance, table.epoch_of(instance) or 0, "second")
    assert table.mark_lost("first") == RedispatchDecision([], [])
    assert [table.epoch_of(instance) for instance in "abc"] == [REDISPATCH_STEP, REDISPATCH_STEP, 0]
    assert (table.load("first"), table.load("second")) == (0, 3)


def test_only_the_report_of_the_newest_dispatch_counts_and_counts_once() -> None:
    """S-PAR-12: late ones and those of nobody are left out."""
    table = table_of("a")
    table.mark_lost("first")
    table.record_dispatch("a", REDISPATCH_STEP, "second")
    reported = [table.report("a", epoch) for epoch in (0, REDISPATCH_STEP, REDISPATCH_STEP)]
    assert reported == [False, True, False]
    assert not table.report("x", 0)
    assert (len(table), table.load("second"), table.epoch_of("a")) == (0, 0, None)


def test_order_is_hopeless_after_its_third_death() -> None:
    """S-DUR-31: it may well be what kills its processes."""
    table = table_of("a")
    for number in range(1, MOST_DEATHS):
        assert table.mark_lost("first").to_retry == ["a"]
        assert table.deaths_of("a") == number
        table.record_dispatch("a", table.epoch_of("a") or 0, "first")
    assert table.mark_lost("first") == RedispatchDecision([], ["a"])
    assert table.abandon("first", ["a"]) == ["a"]
    assert table.abandon("first", ["a"]) == []
    assert table.mark_lost("first") == RedispatchDecision([], [])
    assert table.report("a", (MOST_DEATHS - 1) * REDISPATCH_STEP)


def test_order_is_hopeless_after_its_first_death_when_nothing_is_recorded() -> None:
    """S-DUR-2: all would be done again."""
    assert table_of("a", is_recorded=False).mark_lost("first") == RedispatchDecision([], ["a"])


def test_order_is_hopeless_when_somebody_wants_it_to_end() -> None:
    """S-PAR-34: it is reported as stopped; the others go on."""
    table = table_of("a", "b")
    assert table.stop(["a", "x"]) == {"first": ["a"]}
    assert (table.is_stopped("a"), table.is_stopped("b"), table.is_stopped("x")) == (True, False, False)
    assert table.mark_lost("first") == RedispatchDecision(["b"], ["a"])


def test_processes_are_stuck_while_they_hold_what_was_stopped() -> None:
    """S-PAR-34: all of them, or those of some orders."""
    table = table_of("a", "b")
    table.record_dispatch("c", 0, "second")
    assert table.stuck() == []
    table.stop("ac")
    assert table.stuck() == ["first", "second"]
    assert table.stuck(["b", "c", "x"]) == ["second"]
    table.report("c", 0)
    assert table.stuck() == ["first"]


def test_orders_of_a_living_process_are_given_up_once() -> None:
    """S-PAR-34: a call to it failed; what another has, or was reported, is not touched."""
    table = table_of("a", "b", "c")
    table.record_dispatch("b", 0, "second")
    table.report("c", 0)
    assert table.orders_of("first") == ["a"]
    assert table.abandon("first", ["a", "b", "c"]) == ["a"]
    assert (table.abandon("first", ["a"]), table.load("first")) == ([], 0)
    table.forget_process("first")
    assert table.orders_of("first") == []


def test_order_that_was_not_begun_is_handed_to_another_process() -> None:
    """S-MR-142: under the same epoch; the first one has it no more."""
    table = table_of("a")
    table.record_dispatch("a", 0, "second")
    assert (table.load("first"), table.load("second"), table.epoch_of("a")) == (0, 1, 0)
    assert (table.process_of("a"), table.process_of("x")) == ("second", None)
