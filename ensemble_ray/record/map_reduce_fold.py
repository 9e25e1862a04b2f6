"""What the facts of a dynamic run give to whoever goes on with it. Pure, but for the reading.

In: the facts of a dynamic run, in order, page by page. Out: which of its work is done, how it was grouped, what its items
were, what it spent. Outputs and failures are handed on as they pass by and are not kept: a run may have a million.
Never: more than 64 bytes for an item; a repetition of what is recorded; a failure held against a run that goes on to try
that work again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, cast, overload

from ensemble_ray.errors import RecordError
from ensemble_ray.errors.travel import is_refusal_data
from ensemble_ray.facts.effects import ModelAnswered, is_making_agent
from ensemble_ray.facts.fact import Fact, kinds_of
from ensemble_ray.facts.runs import (
    DirectiveFact,
    DirectiveRecorded,
    ExitRecorded,
    FailureRecorded,
    GroupRecorded,
    ItemOutputRecorded,
    ItemsRecorded,
    ModelSwitched,
    OutputRecorded,
    PlanRecorded,
    RunResumed,
    StimulusRecorded,
)
from ensemble_ray.record.head import HEAD_KINDS, RunHead
from ensemble_ray.record.identity.map_reduce import DIGEST_DIGITS, DIRECT, FINAL, map_key, position_of, reduce_key
from ensemble_ray.record.resume.reading import KeepFailure, KeepOutput, read_pages
from ensemble_ray.schedule.instructions import ReduceGroup
from ensemble_ray.schedule.stimuli import Evaluated, decode_stimulus
from ensemble_ray.values.ids import effect_name, instance_of, is_inside_unit, key_of, node_key
from ensemble_ray.values.outputs import ExitReason, RunState

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RunStore


#: Bytes of an item's hash.
_DIGEST = DIGEST_DIGITS // 2
#: In place of a hash: nothing to compare.
_NOT_COMPARED = bytes(_DIGEST)
#: A place further behind the last one than this is far out, and costs more than a byte.
_GAP = 1 << 16


class Codes:
    """A small number for each of many whole numbers, 0 at first. A byte each, except for a few far out."""

    def __init__(self) -> None:
        self._near = bytearray()
        self._far: dict[int, int] = {}

    def __getitem__(self, place: int) -> int:
        return self._near[place] if place < len(self._near) else self._far.get(place, 0)

    def __setitem__(self, place: int, code: int) -> None:
        if place >= len(self._near) + _GAP:
            self._far[place] = code
            return
        if place >= len(self._near):
            self._near += bytes(place + 1 - len(self._near))
            for far in [each for each in self._far if each <= place]:
                self._near[far] = self._far.pop(far)
        self._near[place] = code

    def count(self, code: int) -> int:
        """How many have that code; not asked for 0."""
        return self._near.count(code) + sum(each == code for each in self._far.values())

    def places(self, code: int) -> Iterator[int]:
        """Which have that code."""
        place = self._near.find(code)
        while place >= 0:
            yield place
            place = self._near.find(code, place + 1)
        yield from [far for far, each in self._far.items() if each == code]


class RecordedItems:
    """The items that a run pulled, as hashes, in the order in which it did.

    Attributes:
        are_all: Whether its source was seen to have no more.
    """

    def __init__(self) -> None:
        self.are_all = False
        self._digests = bytearray()
        #: index of each, unless they are 0, 1, 2, ...
        self._indices: array[int] | None = None
        #: with indices: which were pulled, and their places in the order of their indices, made when one is looked for
        self._pulled = Codes()
        self._by_index: array[int] | None = None

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self._digests) // _DIGEST

    def index(self, number: int) -> int:
        """Return the index of the item before which so many were pulled."""
        return number if self._indices is None else self._indices[number]

    def number(self, index: int) -> int | None:
        """How many items were pulled before the one of that index; None when it was not pulled."""
        if self._indices is None:
            return index if 0 <= index < self.count else None
        if not self._pulled[index]:
            return None
        indices = self._indices
        if self._by_index is None:
            self._by_index = array("q", sorted(range(len(indices)), key=indices.__getitem__))
        return self._by_index[bisect_left(self._by_index, index, key=indices.__getitem__)]

    def digest(self, index: int) -> str | None:
        """Return what `item_digest` gave of the item of that index; None when it was not pulled."""
        number = self.number(index)
        if number is None:
            return None
        value = bytes(self._digests[number * _DIGEST : (number + 1) * _DIGEST])
        return "" if value == _NOT_COMPARED else value.hex()

    def apply(self, pulled: ItemsRecorded) -> None:
        """Take the next items.

        Raises:
            RecordError: their fact is damaged.
        """
        for index, digest in zip(pulled.places(), pulled.digests, strict=True):
            self._apply_item(index, digest)
        self.are_all = self.are_all or pulled.are_all

    def _apply_item(self, index: int, digest: str) -> None:
        try:
            value = bytes.fromhex(digest) or _NOT_COMPARED
        except ValueError:
            value = b""
        if len(value) != _DIGEST:
            raise RecordError(f"The record is damaged: '{digest}' is no hash of an item")
        number = self.number(index)
        if number is not None:  # a run that goes on with other items than before says so again
            self._digests[number * _DIGEST : (number + 1) * _DIGEST] = value
            return
        if self._indices is None and index != self.count:
            self._indices = array("q", range(self.count))
            for previous in self._indices:
                self._pulled[previous] = 1
        if self._indices is not None:
            self._indices.append(index)
            self._pulled[index] = 1
            self._by_index = None
        self._digests += value


class RecordedGroups(Sequence[ReduceGroup]):
    """The recorded groups in their order, each made when it is asked for; the numbers of maps are those of the machine."""

    def __init__(self, items: RecordedItems) -> None:
        self._items = items
        #: of each group: level, number, where its inputs begin; of each input: level and number
        self._levels, self._numbers, self._begins = array("q"), array("q"), array("q", [0])
        self._input_levels, self._input_numbers = array("q"), array("q")
        #: place of the final one
        self._final: int | None = None
        #: by level: which numbers are known
        self._recorded: dict[int, Codes] = {}

    @property
    def counts(self) -> Mapping[int, int]:
        """How many there are, by level."""
        return {level: recorded.count(1) for level, recorded in self._recorded.items()}

    @property
    def final(self) -> ReduceGroup | None:
        """The final reduce, if it is recorded."""
        return None if self._final is None else self[self._final]

    def apply(self, group: GroupRecorded) -> None:
        """Take the next group; one that is known stays as it is.

        Raises:
            RecordError: its fact is damaged.
        """
        inputs = [position_of(key) for key in group.inputs]
        level, number = group.level, group.number
        if level < 1 or number < 0 or not inputs:
            raise RecordError(f"The record is damaged: {group.to_data()} is no group")
        recorded = self._recorded.setdefault(level, Codes())
        if recorded[number]:
            return
        recorded[number] = 1
        for key, found in zip(group.inputs, inputs, strict=True):
            if found is None:
                raise RecordError(f"The record is damaged: '{key}' in a group is no map and no reduce")
            self._input_levels.append(found[0])
            self._input_numbers.append(found[1])
        if group.is_final:
            self._final = len(self._levels)
        self._levels.append(level)
        self._numbers.append(number)
        self._begins.append(len(self._input_levels))

    def __len__(self) -> int:
        return len(self._levels)

    @overload
    def __getitem__(self, place: int) -> ReduceGroup: ...
    @overload
    def __getitem__(self, place: slice) -> list[ReduceGroup]: ...
    def __getitem__(self, place: int | slice) -> ReduceGroup | list[ReduceGroup]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        where = range(len(self))[place]
        inputs = range(self._begins[where], self._begins[where + 1])
        return ReduceGroup(
            level=self._levels[where],
            number=self._numbers[where],
            inputs=tuple(map(self._input, inputs)),
            is_final=where == self._final,
        )

    def _input(self, place: int) -> tuple[int, int]:
        level, number = self._input_levels[place], self._input_numbers[place]
        if level == 0:
            pulled = self._items.number(number)
            if pulled is None:
                raise RecordError(f"The record is damaged: the item of '{map_key(number)}' in a group is not recorded")
            return 0, pulled
        return level, number


#: Kinds of facts that the fold looks at.
MAP_REDUCE_KINDS = (
    *HEAD_KINDS,
    *kinds_of(
        ItemsRecorded,
        GroupRecorded,
        ItemOutputRecorded,
        StimulusRecorded,
        ModelAnswered,
        OutputRecorded,
        FailureRecorded,
        ExitRecorded,
        DirectiveRecorded,
        ModelSwitched,
    ),
)
#: What calls that made the agent of some work have in their names.
_MAKING = "synthesis"

_End = OutputRecorded | FailureRecorded | ExitRecorded | ItemOutputRecorded


class RecordedOutcome(IntEnum):
    """What is recorded of some work."""

    #: nothing, or it is to be done again
    UNKNOWN = 0
    COMPLETED = 1
    FAILED = 2
    #: it ended the run early; why is in `MapReduceRecovery.exits`
    EXITED = 3


class MapReduceRecovery:
    """What is known of a dynamic run.

    Attributes:
        head: How it began, and how it stands.
        items: What it pulled from its source.
        groups: What came together, in the order in which it did.
        exits: By key: why work ended the run early.
        input_tokens: Of all its recorded model calls, as far as the provider counted them.
        output_tokens: The same of the answers.
        uncounted_calls: Model calls of which the provider did not count something.
        verdicts: By instance of an item that has not ended: what the predicate of its loop answered (S-MR-193).
        answers: By effect name: answers to calls that made the agents of work that has not ended (S-SET-46).
    """

    def __init__(
        self,
        keep: KeepOutput | None = None,
        keep_failure: KeepFailure | None = None,
        keep_inner: Callable[[str, Fact[OutputRecorded] | Fact[FailureRecorded]], None] | None = None,
        keep_item: Callable[[str, ItemOutputRecorded], None] | None = None,
    ) -> None:
        """Begin without facts.

        Args:
            keep: Takes each recorded output, as it passes by.
            keep_failure: Takes each recorded failure. The work may be tried again afterwards:
                `outcome` says in the end which failures count.
            keep_inner: Takes the recorded ends of tasks of items that are more than one task, by the item's key.
            keep_item: Takes which of them are the output of their item.
        """
        self.head = RunHead()
        self.items = RecordedItems()
        self.groups = RecordedGroups(self.items)
        self.exits: dict[str, ExitReason] = {}
        self.answers: dict[str, list[Fact[ModelAnswered]]] = {}
        self.input_tokens = self.output_tokens = self.uncounted_calls = 0
        self._keep = keep
        self._keep_failure = keep_failure
        self._keep_inner = keep_inner
        self._keep_item = keep_item
        #: what people told the run
        self.directives: list[DirectiveFact] = []
        self.verdicts: dict[str, list[Evaluated]] = {}
        #: outcomes by level and number, and of work that has neither in its key
        self._levels: dict[int, Codes] = {}
        self._named: dict[str, int] = {}
        #: work that a provider refused as it would have refused all other work
        self._refused: list[str] = []
        #: which execution of some work counts, where it is not the first
        self._occurrences: dict[str, int] = {}

    def apply(self, facts: Iterable[Fact]) -> None:
        """Take the next facts.

        Raises:
            RecordError: one of them is damaged.
        """
        facts = tuple(facts)
        self.directives += (fact.data for fact in facts if isinstance(fact.data, DirectiveFact))
        for fact in facts:
            match fact.data:
                case ModelAnswered() as answer:
                    self._count(answer)
                    if is_making_agent(fact):
                        self.answers.setdefault(fact.name, []).append(cast("Fact[ModelAnswered]", fact))
                case StimulusRecorded():
                    self._apply_verdict(cast("Fact[StimulusRecorded]", fact))
                case OutputRecorded() | FailureRecorded() | ExitRecorded() | ItemOutputRecorded() as end:
                    self._apply_end(fact, end)
                case ItemsRecorded() as pulled:
                    self.items.apply(pulled)
                case GroupRecorded() as group:
                    self.groups.apply(group)
                case RunResumed(is_restart=is_restart):
                    if not is_restart:
                        self._forgive()
                    self.head.apply(fact)
                case _:
                    self.head.apply(fact)

    # What is known.

    def outcome(self, key: str) -> RecordedOutcome:
        """Return what is recorded of some work; nothing of what a run that goes on tries again."""
        position = position_of(key)
        if position is None:
            return RecordedOutcome(self._named.get(key, 0))
        codes = self._levels.get(position[0])
        return RecordedOutcome(0 if codes is None else codes[position[1]])

    def count(self, outcome: RecordedOutcome, level: int | None = None) -> int:
        """How much work of a level, or of all levels, has that outcome; not asked for UNKNOWN."""
        levels = self._levels.values() if level is None else [self._levels[level]] if level in self._levels else []
        named = sum(each == outcome for each in self._named.values()) if level is None else 0
        return named + sum(codes.count(outcome) for codes in levels)

    def instance(self, key: str) -> str:
        """Return the execution of some work that counts: that of its recorded end, else the one that goes on or begins."""
        return instance_of(key, occurrence=self._occurrences.get(key, 0))

    def go_on(self) -> None:
        """Somebody wants it to go on now: failures that ended it are forgiven, as after a recorded `resume`."""
        self._forgive()

    # Folding.

    def _forgive(self) -> None:
        """Work whose failure ended the run is to be done again, as another execution (S-MR-163, S-MR-155)."""
        for key in self._refused:
            self._set(key, RecordedOutcome.UNKNOWN)
            self._repeat(key)
        self._refused.clear()
        if self.head.state is not RunState.FAILED:
            return
        for level, codes in self._levels.items():
            # What was left out stays left out: others went on without it, and the reduces above were grouped so.
            is_to_blame = fails_on_item(self.head.header) or (
                level > 0 and not self._named.get(FINAL) and not codes.count(RecordedOutcome.COMPLETED)
            )
            for number in list(codes.places(RecordedOutcome.FAILED)) if is_to_blame else ():
                codes[number] = RecordedOutcome.UNKNOWN
                self._repeat(reduce_key(level, number) if level else map_key(number))
        for key in [key for key, code in self._named.items() if code == RecordedOutcome.FAILED]:
            del self._named[key]
            self._repeat(key)

    def _repeat(self, key: str) -> None:
        self._occurrences[key] = self._occurrences.get(key, 0) + 1

    def _apply_verdict(self, fact: Fact[StimulusRecorded]) -> None:
        stimulus = decode_stimulus(fact)
        if isinstance(stimulus, Evaluated):
            self.verdicts.setdefault(fact.name, []).append(stimulus)

    def _apply_inner(self, fact: Fact) -> None:
        """Take the end of a task of an item that is more than one; work that a task handed on belongs to it."""
        if not is_inside_unit(fact.name):
            return
        item = key_of(fact.name.partition("/")[0])
        self.answers.pop(effect_name(instance_of(f"{item}/{node_key(fact.name)}"), 0, _MAKING), None)
        if self._keep_inner is not None and not isinstance(fact.data, ExitRecorded):
            self._keep_inner(item, cast("Fact[OutputRecorded] | Fact[FailureRecorded]", fact))

    def _apply_end(self, fact: Fact, end: _End) -> None:
        """Take how some work ended."""
        key, _, occurrence = fact.name.rpartition("#")
        if "/" in fact.name:
            self._apply_inner(fact)
            return
        if not occurrence.isdecimal():
            return
        self.verdicts.pop(fact.name, None)
        self.answers.pop(effect_name(fact.name, 0, _MAKING), None)
        number, counted = int(occurrence), self._occurrences.get(key, 0)
        if number < counted:
            return
        if number > counted:
            self._occurrences[key] = number
        self._apply_outcome(key, fact, end)

    def _apply_outcome(self, key: str, fact: Fact, end: _End) -> None:
        match end:
            case ItemOutputRecorded():
                self._set(key, RecordedOutcome.COMPLETED)
                if self._keep_item is not None:
                    self._keep_item(key, end)
            case OutputRecorded():
                self._set(key, RecordedOutcome.COMPLETED)
                if self._keep is not None:
                    self._keep(key, end)
            case FailureRecorded():
                self._set(key, RecordedOutcome.FAILED)
                if not end.is_of_callable and is_refusal_data(end.error):
                    self._refused.append(key)
                if self._keep_failure is not None:
                    self._keep_failure(key, cast("Fact[FailureRecorded]", fact))
            case ExitRecorded(reason=reason):
                if reason is not ExitReason.BUDGET_EXHAUSTED:  # that goes on with a larger one
                    self._set(key, RecordedOutcome.EXITED)
                    self.exits[key] = reason

    def _set(self, key: str, outcome: RecordedOutcome) -> None:
        position = position_of(key)
        if position is not None:
            self._levels.setdefault(position[0], Codes())[position[1]] = outcome
        elif key in {FINAL, DIRECT}:
            self._named[key] = outcome

    def _count(self, answer: ModelAnswered) -> None:
        asked, answered = int(answer.input_tokens), int(answer.output_tokens)
        self.input_tokens += max(asked, 0)
        self.output_tokens += max(answered, 0)
        self.uncounted_calls += asked < 0 or answered < 0


def fails_on_item(header: PlanRecorded) -> bool:
    """Whether the first failed map ends the run, by its first fact (S-MR-150)."""
    rules = header.plan or {}
    chosen = rules.get("on_item_error")
    return chosen == "fail" if chosen is not None else rules.get("parallel_error_strategy") != "continue_on_error"


def refusal_of(head: RunHead) -> str:
    """Why a dynamic run cannot go on, with what can be done instead; empty when it can (S-MR-163)."""
    if (
        head.state is not RunState.FAILED
        or fails_on_item(head.header)
        or head.end is None
        or head.end.failure != "all_maps"
    ):
        return ""
    return (
        "all its maps failed, and their failures were to be left out. Begin a new run; "
        "where it wrote dead letters, a run over DeadLetters(path) maps the failed items again"
    )


async def read_map_reduce(
    store: RunStore, run_id: str, keep: KeepOutput | None = None, keep_failure: KeepFailure | None = None
) -> MapReduceRecovery:
    """Read what is known of a dynamic run, page by page; see `MapReduceRecovery`. `keep` and `keep_failure` are called here.

    Raises:
        RecordError: the record is damaged, of a newer format, or was removed meanwhile.
    """
    found = MapReduceRecovery(keep, keep_failure)
    await read_pages(store, run_id, MAP_REDUCE_KINDS, found.apply)
    return found
