"""Map-reduce runs as obedient conductors would make them: the machine is checked after every step, all is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ensemble_ray.schedule.map_reduce import MapReduceMachine
from ensemble_ray.schedule.map_reduce_words import (
    Begun,
    EndFed,
    Failure,
    FedInstruction,
    FedStimulus,
    Grouping,
    ItemsPulled,
    MapReduceRules,
    PullItems,
    StartMap,
    StartReduce,
    StopWork,
    WorkCancelled,
    WorkCompleted,
    WorkFailed,
)
from ensemble_ray.values.outputs import ExitReason, RunState

Work = tuple[int, int]
#: What a reduce is made of, all the way down to the items: a number for a map, a tuple for a reduce.
Tree = int | tuple["Tree", ...]
Word = TypeVar("Word")

COMPLETED = EndFed(state=RunState.COMPLETED, exit_reason=ExitReason.COMPLETED)
CANCELLED = EndFed(state=RunState.CANCELLED, exit_reason=ExitReason.CANCELLED)
BEGUN = Begun(at=0.0)


def by_budget(
    capacity: int, *, max_levels: int = 10, window: int = 4, fails: bool = False, **order: bool
) -> MapReduceRules:
    """Rules of an adaptive run."""
    return MapReduceRules(
        grouping=Grouping.BUDGET,
        capacity=capacity,
        max_levels=max_levels,
        window=window,
        fails_on_item=fails,
        fails_on_reduce=fails,
        is_pipelined=order.get("is_pipelined", False),
        is_ordered=order.get("is_ordered", False),
    )


def by_chunk(size: int, *, window: int = 4, fails: bool = False, **order: bool) -> MapReduceRules:
    """Rules of a static run."""
    return MapReduceRules(
        grouping=Grouping.CHUNK,
        capacity=size,
        window=window,
        fails_on_item=fails,
        fails_on_reduce=fails,
        is_pipelined=order.get("is_pipelined", False),
        is_ordered=order.get("is_ordered", False),
    )


def maps_only(*, window: int = 4, fails: bool = False) -> MapReduceRules:
    """Rules of a run without reduces."""
    return MapReduceRules(grouping=Grouping.NONE, window=window, fails_on_item=fails, fails_on_reduce=fails)


def oldest(running: Sequence[Work]) -> int:
    """Which work ends next: the one that started first."""
    del running
    return 0


def failed(failure: Failure) -> EndFed:
    """How a run ends that failed."""
    return EndFed(state=RunState.FAILED, exit_reason=ExitReason.ERROR, failure=failure)


def final(level: int, *inputs: Work) -> StartReduce:
    """The final reduce, where it is the only one on its level."""
    return StartReduce(level=level, number=0, inputs=inputs, is_final=True)


def weighing(*tokens: int, reduced: int = 1) -> Callable[[Work], int]:
    """Maps weigh what is listed, reduces all the same."""
    return lambda work: reduced if work[0] else tokens[work[1]]


def one_token(work: Work) -> int:
    """How much an output weighs."""
    del work
    return 1


@dataclass(kw_only=True)
class Feed:
    """A run: items are there when they are asked for; works end when told to."""

    rules: MapReduceRules
    items: int
    recorded: Sequence[StartReduce] = ()
    given: int = 0
    wanted: list[FedInstruction] = field(default_factory=list)
    running: list[Work] = field(default_factory=list)
    asked: int = 0
    most_at_once: int = 0
    ended: list[Work] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = MapReduceMachine(self.rules, self.recorded)

    def tell(self, *stimuli: FedStimulus) -> list[FedInstruction]:
        """Tell the machine, keep what it wants."""
        done = self.machine.handle(*stimuli)
        self.machine.validate()
        for each in done:
            assert not self.ends, "nothing is wanted after the end"
            self.wanted.append(each)
            if isinstance(each, PullItems):
                assert not self.asked, "one question at a time"
                self.asked = each.count
            elif isinstance(each, StartMap):
                assert each.number < self.given
                self.running.append((0, each.number))
            elif isinstance(each, StartReduce):
                self.running.append((each.level, each.number))
        self.most_at_once = max(self.most_at_once, len(self.running))
        assert tuple(self.running) == self.machine.running
        return done

    def begin(self) -> Feed:
        """Let it begin and have its first items."""
        self.tell(Begun(at=0.0))
        self.give()
        return self

    def give(self, most: int | None = None) -> list[FedInstruction]:
        """Answer its question for items, whose last ones are told to be the last."""
        count = min(self.asked, self.items - self.given, self.asked if most is None else most)
        self.given += count
        self.asked = 0
        return self.tell(ItemsPulled(at=1.0, count=count, is_exhausted=self.given == self.items))

    def complete(self, work: Work, tokens: int = 0) -> list[FedInstruction]:
        """One has its output."""
        self.running.remove(work)
        self.ended.append(work)
        return self.tell(WorkCompleted(at=2.0, level=work[0], number=work[1], weight_tokens=tokens))

    def fail(self, work: Work) -> list[FedInstruction]:
        """One failed."""
        self.running.remove(work)
        self.ended.append(work)
        return self.tell(WorkFailed(at=2.0, level=work[0], number=work[1]))

    def play(
        self,
        tokens: Callable[[Work], int] = one_token,
        *,
        failing: Collection[Work] = (),
        choose: Callable[[Sequence[Work]], int] = oldest,
        most: int | None = None,
    ) -> Feed:
        """Run it to its end, or until that many works have ended."""
        if not self.wanted:
            self.begin()
        while not self.ends and (most is None or len(self.ended) < most):
            if self.asked:
                self.give()
                continue
            work = self.running[choose(self.running)]
            if StopWork(level=work[0], number=work[1]) in self.wanted:
                self.running.remove(work)
                self.tell(WorkCancelled(at=3.0, level=work[0], number=work[1]))
            elif work in failing:
                self.fail(work)
            else:
                self.complete(work, tokens(work))
        return self

    def all(self, kind: type[Word]) -> list[Word]:
        """Everything of that kind that was wanted."""
        return [each for each in self.wanted if isinstance(each, kind)]

    @property
    def reduces(self) -> list[StartReduce]:
        """All reduces, in the order of their starts."""
        return self.all(StartReduce)

    @property
    def ends(self) -> list[EndFed]:
        """How it ended."""
        return self.all(EndFed)

    @property
    def tree(self) -> Tree:
        """What the final reduce is made of."""
        made = {(each.level, each.number): each for each in self.reduces}

        def below(work: Work) -> Tree:
            return tuple(below(each) for each in made[work].inputs) if work[0] else work[1]

        (final,) = (work for work, each in made.items() if each.is_final)
        return below(final)

    def numbers(self, *, level: int) -> list[list[int]]:
        """The groups of a level by the numbers of their inputs, which are all of the level below."""
        return [
            [number for _, number in each.inputs]
            for each in sorted(self.reduces, key=lambda each: each.number)
            if each.level == level
        ]


def leaves(tree: Tree) -> Iterable[int]:
    """The items of a tree, from left to right."""
    if isinstance(tree, int):
        yield tree
    else:
        for each in tree:
            yield from leaves(each)
