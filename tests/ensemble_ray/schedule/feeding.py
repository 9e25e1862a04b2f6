"""Map-reduce runs as obedient coordinators would make them: the machine is checked after every step, all is kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ensemble_ray import ExitReason, RunState
from ensemble_ray.schedule.instructions import (
    Cancel,
    End,
    Evaluate,
    FailureReason,
    Instruction,
    MapItem,
    PullItems,
    ReduceGroup,
    Start,
    WarnLeftOut,
)
from ensemble_ray.schedule.map_reduce import MapReduceMachine
from ensemble_ray.schedule.map_reduce_groups import Grouping, MapReduceRules
from ensemble_ray.schedule.stimuli import Begun, Cancelled, Completed, Evaluated, Exited, Failed, ItemsPulled, Stimulus
from tests.ensemble_ray.schedule.invariants import check

Work = tuple[int, int]
#: What a reduce is made of, all the way down to the items: a number for a map, a tuple for a reduce.
Tree = int | tuple["Tree", ...]
Word = TypeVar("Word")

COMPLETED = End(state=RunState.COMPLETED, exit_reason=ExitReason.COMPLETED)
CANCELLED = End(state=RunState.CANCELLED, exit_reason=ExitReason.CANCELLED)
BEGUN = Begun(at=0.0)


def name(work: Work) -> str:
    """Return the instance of a task."""
    return f"{work[0]}-{work[1]}#0"


def name_of(made_of: MapItem | ReduceGroup) -> str:
    """Return the instance of a task by what it is made of."""
    return name((made_of.level if isinstance(made_of, ReduceGroup) else 0, made_of.number))


def start_map(number: int) -> Start:
    """Start the map of an item."""
    return Start(instance=name((0, number)), changes=MapItem(number=number))


def start_reduce(level: int, number: int, *inputs: Work) -> Start:
    """Start a reduce that is not the final one."""
    return Start(instance=name((level, number)), changes=ReduceGroup(level=level, number=number, inputs=inputs))


def stop(level: int, number: int) -> Cancel:
    """Stop a task."""
    return Cancel(instance=name((level, number)))


def left_out(level: int, number: int) -> WarnLeftOut:
    """Warn of a task that is left out."""
    return WarnLeftOut(instance=name((level, number)))


def pull(count: int) -> Evaluate:
    """Ask for items."""
    return Evaluate(question=PullItems(count=count))


def pulled(count: int, *refused: int, is_exhausted: bool, at: float = 1.0) -> Evaluated:
    """Give items."""
    answer = ItemsPulled(count=count, is_exhausted=is_exhausted, refused=refused)
    return Evaluated(at=at, question=PullItems(count=count), answer=answer)


def raised(at: float = 2.0) -> Evaluated:
    """Let the source of items raise."""
    return Evaluated(at=at, question=PullItems(count=1), answer=None)


def completed(work: Work, tokens: int | None = 0) -> Completed:
    """Let a task have its output."""
    return Completed(at=2.0, instance=name(work), output_tokens=tokens)


def broken(work: Work) -> Failed:
    """Let a task fail."""
    return Failed(at=2.0, instance=name(work))


def exited(work: Work, reason: ExitReason) -> Exited:
    """Let a task end the run early."""
    return Exited(at=2.0, instance=name(work), reason=reason)


def stopped(work: Work) -> Cancelled:
    """Let a task have been stopped."""
    return Cancelled(at=3.0, instance=name(work))


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


def failed(failure: FailureReason) -> End:
    """How a run ends that failed."""
    return End(state=RunState.FAILED, exit_reason=ExitReason.ERROR, failure=failure)


def final(level: int, *inputs: Work) -> ReduceGroup:
    """The final reduce, where it is the only one on its level."""
    return ReduceGroup(level=level, number=0, inputs=inputs, is_final=True)


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
    recorded: Sequence[ReduceGroup] = ()
    pulled_count: int = 0
    wanted: list[Instruction] = field(default_factory=list)
    running: list[Work] = field(default_factory=list)
    asked: int = 0
    most_at_once: int = 0
    ended: list[Work] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = MapReduceMachine(self.rules, name_of, self.recorded)

    def handle(self, *stimuli: Stimulus) -> list[Instruction]:
        """Tell the machine, keep what it wants."""
        done = self.machine.handle(*stimuli)
        check(self.machine)
        for each in done:
            assert not self.ends, "nothing is wanted after the end"
            self.wanted.append(each)
            if isinstance(each, Evaluate) and isinstance(each.question, PullItems):
                assert not self.asked, "one question at a time"
                self.asked = each.question.count
            elif isinstance(each, Start) and isinstance(each.changes, MapItem):
                assert each.changes.number < self.pulled_count
                self.running.append((0, each.changes.number))
            elif isinstance(each, Start) and isinstance(each.changes, ReduceGroup):
                self.running.append((each.changes.level, each.changes.number))
        self.most_at_once = max(self.most_at_once, len(self.running))
        assert tuple(map(name, self.running)) == self.machine.running
        return done

    def begin(self) -> Feed:
        """Let it begin and have its first items."""
        self.handle(Begun(at=0.0))
        self.give()
        return self

    def give(self, most: int | None = None) -> list[Instruction]:
        """Answer its question for items, whose last ones are told to be the last."""
        count = min(self.asked, self.items - self.pulled_count, self.asked if most is None else most)
        self.pulled_count += count
        self.asked = 0
        return self.handle(pulled(count, is_exhausted=self.pulled_count == self.items))

    def complete(self, work: Work, tokens: int = 0) -> list[Instruction]:
        """One has its output."""
        self.running.remove(work)
        self.ended.append(work)
        return self.handle(completed(work, tokens))

    def fail(self, work: Work) -> list[Instruction]:
        """One failed."""
        self.running.remove(work)
        self.ended.append(work)
        return self.handle(broken(work))

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
            if stop(*work) in self.wanted:
                self.running.remove(work)
                self.handle(stopped(work))
            elif work in failing:
                self.fail(work)
            else:
                self.complete(work, tokens(work))
        return self

    def all(self, kind: type[Word]) -> list[Word]:
        """Everything of that kind that was wanted."""
        return [each for each in self.wanted if isinstance(each, kind)]

    @property
    def reduces(self) -> list[ReduceGroup]:
        """All reduces, in the order of their starts."""
        return [each.changes for each in self.all(Start) if isinstance(each.changes, ReduceGroup)]

    @property
    def ends(self) -> list[End]:
        """How it ended."""
        return self.all(End)

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
