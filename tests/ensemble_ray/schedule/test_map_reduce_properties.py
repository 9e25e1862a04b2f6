"""Map-reduce played with at random: weights, budgets, windows, failures, orders of completion, cuts and ends."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ensemble_ray import ExitReason, RunState
from ensemble_ray.schedule.instructions import ReduceGroup
from ensemble_ray.schedule.map_reduce_groups import Grouping, MapReduceRules
from ensemble_ray.schedule.stimuli import CancelRequested, Failed
from tests.ensemble_ray.schedule.feeding import Feed, Work, exited, leaves, name, raised

#: Seeded and without a store of examples, so that a run gives the same everywhere.
SEEDED = settings(max_examples=40)


@dataclass(frozen=True, kw_only=True)
class World:
    """What does not depend on who is first: how much outputs weigh, and which works fail."""

    rules: MapReduceRules
    items: int
    weights: tuple[int, ...]
    growth: int
    failing: frozenset[Work]

    def tokens(self, work: Work) -> int:
        """Outputs of higher levels may be larger than all that went into them."""
        level, number = work
        return self.weights[(3 * level + number) % len(self.weights)] * int(self.growth**level)

    def weight(self, work: Work) -> int:
        """What counts for a group."""
        return self.tokens(work) if self.rules.grouping is Grouping.BUDGET else 1

    def feed(self, recorded: Sequence[ReduceGroup] = ()) -> Feed:
        """A run that has not begun."""
        return Feed(rules=self.rules, items=self.items, recorded=recorded)

    def play(self, chance: int, *, recorded: Sequence[ReduceGroup] = (), most: int | None = None) -> Feed:
        """A run in an order that chance decides."""
        return self.feed(recorded).play(self.tokens, failing=self.failing, choose=chosen(chance), most=most)


def chosen(chance: int) -> Callable[[Sequence[Work]], int]:
    """Which work ends next."""
    source = random.Random(chance)  # noqa: S311  a seeded order
    return lambda running: source.randrange(len(running))


@st.composite
def worlds(draw: st.DrawFn, *, fails: bool = False) -> World:
    """Any rules that are no contradiction."""
    is_pipelined = draw(st.booleans())
    works = st.tuples(st.integers(0, 2), st.integers(0, 9))
    rules = MapReduceRules(
        grouping=draw(st.sampled_from([Grouping.BUDGET, Grouping.BUDGET, Grouping.CHUNK])),
        capacity=draw(st.integers(2, 30)),
        max_levels=draw(st.integers(1, 4)),
        is_pipelined=is_pipelined,
        is_ordered=is_pipelined and draw(st.booleans()),
        window=draw(st.integers(1, 6)),
        fails_on_item=fails and draw(st.booleans()),
        fails_on_reduce=fails and draw(st.booleans()),
    )
    return World(
        rules=rules if rules.grouping is Grouping.BUDGET else structs.replace(rules, max_levels=None),
        items=draw(st.integers(1, 18)),
        weights=tuple(draw(st.lists(st.integers(0, 20), min_size=1, max_size=9))),
        growth=draw(st.sampled_from([1, 1, 3])),
        failing=draw(st.frozensets(works, max_size=4)) if fails else frozenset(),
    )


def check_groups(world: World, run: Feed) -> None:
    """No output is in two groups, none weighs too much, each is one level above its highest input."""
    used = Counter(each for reduce in run.reduces for each in reduce.inputs)
    assert not used or max(used.values()) == 1
    assert set(used) <= set(run.ended) - world.failing
    assert len({(each.level, each.number) for each in run.reduces}) == len(run.reduces)
    for reduce in run.reduces:
        assert reduce.level == max(level for level, _ in reduce.inputs) + 1
        weight = sum(map(world.weight, reduce.inputs))
        is_capped = reduce.is_final and world.rules.max_levels == reduce.level - 1
        assert weight <= world.rules.capacity or len(reduce.inputs) == 1 or is_capped
    if world.rules.max_levels is not None:
        assert all(reduce.level <= world.rules.max_levels + reduce.is_final for reduce in run.reduces)


def ordered_reduces(run: Feed) -> list[ReduceGroup]:
    """All of them, by name."""
    return sorted(run.reduces, key=lambda each: (each.level, each.number))


@SEEDED
@given(world=worlds(), chance=st.integers(0, 99))
def test_every_item_reaches_the_final_reduce_when_none_fails(world: World, chance: int) -> None:
    """S-MR-42, S-MR-43, S-MR-111, S-MR-112, S-MR-113, S-MR-140: on exactly one way, and it ends."""
    run = world.play(chance)

    assert [(end.state, end.failure) for end in run.ends] == [(RunState.COMPLETED, "")]
    assert sorted(leaves(run.tree)) == list(range(world.items))
    assert run.most_at_once <= world.rules.window
    check_groups(world, run)


@SEEDED
@given(world=worlds(fails=True), chance=st.integers(0, 99))
def test_every_survivor_reaches_the_final_reduce_when_some_fail(world: World, chance: int) -> None:
    """S-MR-100, S-MR-101, S-MR-102, S-MR-104: unless a reduce above it failed; the run ends once."""
    run = world.play(chance)

    check_groups(world, run)
    (end,) = run.ends
    failed = world.failing & set(run.ended)
    maps = {(0, number) for number in range(world.items)}
    if any(world.rules.fails_on_reduce if level else world.rules.fails_on_item for level, _ in failed):
        assert end.failure == "first"
    elif maps <= failed:
        assert end.failure == "all_maps"
    elif end.failure:
        assert end.failure == "level"
        used = {each for reduce in run.reduces for each in reduce.inputs}
        assert set(run.ended) - failed <= used  # nothing was left to go on with
    else:
        lost = {each for each in failed if not each[0]}
        made = {(each.level, each.number): each.inputs for each in run.reduces}
        below = [each for each in failed if each[0]]
        while below:
            work = below.pop()
            lost |= {each for each in made[work] if not each[0]}
            below += [each for each in made[work] if each[0]]
        assert {(0, item) for item in leaves(run.tree)} == maps - lost


@SEEDED
@given(world=worlds(fails=True), chance=st.integers(0, 99), window=st.integers(1, 9))
def test_tree_is_the_same_when_others_end_first(world: World, chance: int, window: int) -> None:
    """S-MR-49, S-MR-113, S-SET-20: for levels and in order, whatever the window."""
    if world.rules.is_pipelined:
        world = replace(world, rules=structs.replace(world.rules, is_ordered=True))
    world = replace(world, rules=structs.replace(world.rules, fails_on_item=False, fails_on_reduce=False))
    other = replace(world, rules=structs.replace(world.rules, window=window))

    assert ordered_reduces(world.play(chance)) == ordered_reduces(other.play(chance + 1))


@SEEDED
@given(world=worlds(), chance=st.integers(0, 99))
def test_groups_equal_the_definition_when_pipelined(world: World, chance: int) -> None:
    """S-MR-111, S-MR-112, word by word: a pool for each level, which goes up when its level is complete."""
    world = replace(world, rules=structs.replace(world.rules, is_pipelined=True, is_ordered=False))
    run = world.play(chance)

    assert [each.inputs for each in run.reduces] == pooled(world, run.ended[:-1])


def pooled(world: World, ended: Sequence[Work]) -> list[tuple[Work, ...]]:
    """The groups of works that ended in that order."""
    cap, capacity, height = world.rules.max_levels, world.rules.capacity, 40
    pools: list[list[Work]] = [[] for _ in range(height)]
    groups: list[tuple[Work, ...]] = []
    made, done, closed = [world.items] + [0] * height, [0] * height, 0

    def make(inputs: Sequence[Work]) -> None:
        groups.append(tuple(inputs))
        made[max(inputs)[0] + 1] += 1

    def put(place: int, work: Work) -> None:
        if world.weight(work) > capacity:
            make([work])
            return
        if sum(map(world.weight, [*pools[place], work])) > capacity:
            make(pools[place])
            pools[place] = []
        pools[place].append(work)

    for work in ended:
        done[work[0]] += 1
        if work[0] != cap:
            put(max(work[0], closed), work)
        while (made[closed + 1] or any(pools[closed + 1 :])) and done[: closed + 1] == made[: closed + 1]:
            closed += 1
            moved, pools[closed - 1] = pools[closed - 1], []
            for each in moved:
                put(closed, each)
    grouped = {each for group in groups for each in group}
    return [*groups, tuple(work for work in ended if work not in grouped)]


@pytest.mark.heavy
@SEEDED
@given(world=worlds(fails=True), chance=st.integers(0, 99), cut=st.integers(0, 30))
def test_tree_is_the_same_when_the_run_is_cut_and_resumed(world: World, chance: int, cut: int) -> None:
    """S-MR-161: groups that had begun are kept; for levels and in order the others are as they would have been."""
    world = replace(world, rules=structs.replace(world.rules, fails_on_item=False, fails_on_reduce=False))
    first = world.play(chance, most=cut)
    is_recorded = set(first.ended)
    by_chance = chosen(chance + 1)
    again = world.feed(first.reduces)

    def choose(running: Sequence[Work]) -> int:
        known = [place for place, work in enumerate(running) if work in is_recorded]
        return known[0] if known else by_chance(running)

    again.play(world.tokens, failing=world.failing, choose=choose)

    assert [each for each in first.reduces if each not in again.reduces] == []
    check_groups(world, again)
    assert len(again.ends) == 1
    if world.rules.is_ordered or not world.rules.is_pipelined:
        assert ordered_reduces(again) == ordered_reduces(world.play(chance + 2))


@SEEDED
@given(world=worlds(fails=True), chance=st.integers(0, 99), at=st.integers(0, 20), event=st.integers(0, 3))
def test_run_ends_once_when_something_comes_between(world: World, chance: int, at: int, event: int) -> None:
    """S-PAR-30, S-MR-123, S-MR-125, S-SET-27: whatever it is, nothing starts after it that must not."""
    run = world.play(chance, most=at)
    started = len(run.reduces)
    is_over = run.machine.is_ended
    if event == 0:
        run.handle(CancelRequested(at=5.0))
    elif event == 1:
        run.asked = 0
        run.handle(raised())
    elif event == 2 and run.running:
        level, number = run.running.pop()
        run.handle(exited((level, number), ExitReason.TIMEOUT))
    elif run.running and run.running[0][0] == 0:
        run.handle(Failed(at=5.0, instance=name(run.running.pop(0)), ends_run=True))
        is_over = True

    if event == 1:
        run.asked = 0
    run.play(world.tokens, failing=world.failing, choose=chosen(chance))

    assert len(run.ends) == 1
    assert run.running == []
    if event < 2 and not is_over:
        assert len(run.reduces) == started
        assert run.ends[0].state in {RunState.CANCELLED, RunState.FAILED}
