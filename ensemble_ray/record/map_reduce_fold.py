"""Fold the facts of a dynamic run into the state from which it resumes. Pure, except `read_map_reduce`.

The fold uses at most 64 bytes per item, and stores no outputs or failures.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import cast, overload

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
from ensemble_ray.record.identity.definition import DIGEST_DIGITS, DIRECT, FINAL, map_key, position_of, reduce_key
from ensemble_ray.record.resume.reading import KeepFailure, KeepOutput, read_pages
from ensemble_ray.record.stores import RunStore
from ensemble_ray.schedule.instructions import ReduceGroup
from ensemble_ray.schedule.stimuli import Evaluated, decode_stimulus
from ensemble_ray.values.ids import effect_name, instance_of, is_inside_unit, key_of, node_key
from ensemble_ray.values.outputs import ExitReason, RunState

_DIGEST = DIGEST_DIGITS // 2
_NOT_COMPARED = bytes(_DIGEST)
_GAP = 1 << 16  # A number this far after the last one is stored in a dictionary.


class OutcomeArray:
    """A small code per whole number, 0 by default. Uses a byte per number, except for a few large numbers."""

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
        return self._near.count(code) + sum(each == code for each in self._far.values())

    def places(self, code: int) -> Iterator[int]:
        place = self._near.find(code)
        while place >= 0:
            yield place
            place = self._near.find(code, place + 1)
        yield from [far for far, each in self._far.items() if each == code]


class RecordedItems:
    def __init__(self) -> None:
        self.are_all = False
        self._digests = bytearray()
        self._indices: array[int] | None = None  # index per item, unless they are 0, 1, 2, ...
        self._pulled = OutcomeArray()  # pulled indices, if any, and their positions by index, computed on demand
        self._by_index: array[int] | None = None

    @property
    def count(self) -> int:
        return len(self._digests) // _DIGEST

    def index(self, number: int) -> int:
        return number if self._indices is None else self._indices[number]

    def number(self, index: int) -> int | None:
        """Return how many items were pulled before the item of an index; None if it was not pulled."""
        if self._indices is None:
            return index if 0 <= index < self.count else None
        if not self._pulled[index]:
            return None
        indices = self._indices
        if self._by_index is None:
            self._by_index = array("q", sorted(range(len(indices)), key=indices.__getitem__))
        return self._by_index[bisect_left(self._by_index, index, key=indices.__getitem__)]

    def digest(self, index: int) -> str | None:
        number = self.number(index)
        if number is None:
            return None
        value = bytes(self._digests[number * _DIGEST : (number + 1) * _DIGEST])
        return "" if value == _NOT_COMPARED else value.hex()

    def apply(self, pulled: ItemsRecorded) -> None:
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
        if number is not None:  # a resumed run with changed items records them again
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
    """The recorded groups in order. A group is made when it is read, with the machine's numbers of maps."""

    def __init__(self, items: RecordedItems) -> None:
        self._items = items
        #: by group: level, number, and the start of its inputs; by input: level and number
        self._levels, self._numbers, self._begins = array("q"), array("q"), array("q", [0])
        self._input_levels, self._input_numbers = array("q"), array("q")
        self._final: int | None = None
        self._recorded: dict[int, OutcomeArray] = {}

    @property
    def counts(self) -> Mapping[int, int]:
        return {level: recorded.count(1) for level, recorded in self._recorded.items()}

    @property
    def final(self) -> ReduceGroup | None:
        return None if self._final is None else self[self._final]

    def apply(self, group: GroupRecorded) -> None:
        inputs = [position_of(key) for key in group.inputs]
        level, number = group.level, group.number
        if level < 1 or number < 0 or not inputs:
            raise RecordError(f"The record is damaged: {group.to_data()} is no group")
        recorded = self._recorded.setdefault(level, OutcomeArray())
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
_MAKING = "synthesis"

_End = OutputRecorded | FailureRecorded | ExitRecorded | ItemOutputRecorded


class RecordedOutcome(IntEnum):
    UNKNOWN = 0  # or the work must be repeated
    COMPLETED = 1
    FAILED = 2
    EXITED = 3  # `MapReduceResumeReader.exits` has the reason


class MapReduceResumeReader:
    """The recorded state of a dynamic run. *Work* is a map, a reduce or the direct task, named by its key.

    Attributes:
        exits: By key: the reason for which work ended the run early.
        input_tokens, output_tokens: Of all recorded model calls that the provider counted.
        uncounted_calls: Model calls that the provider did not count.
        verdicts: By instance of an item that has not ended: the answers of its loop's predicate (S-MR-193).
        answers: By effect name: calls that made the agents of work that has not ended (S-SET-46).
    """

    def __init__(
        self,
        keep: KeepOutput | None = None,
        keep_failure: KeepFailure | None = None,
        keep_inner: Callable[[str, Fact[OutputRecorded] | Fact[FailureRecorded]], None] | None = None,
        keep_item: Callable[[str, ItemOutputRecorded], None] | None = None,
    ) -> None:
        """Each callback receives recorded facts of one kind, `keep_inner` also the item's key.

        `outcome` decides in the end which failures count.
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
        self.directives: list[DirectiveFact] = []
        self.verdicts: dict[str, list[Evaluated]] = {}
        self._levels: dict[int, OutcomeArray] = {}  # outcomes by level and number, and of work without these in its key
        self._named: dict[str, int] = {}
        self._refused: list[str] = []  # refused by a provider for a reason that applies to all work
        self._occurrences: dict[str, int] = {}  # execution that counts, by key, if it is not the first

    def apply(self, facts: Iterable[Fact]) -> None:
        facts = tuple(facts)
        self.directives += (fact.data for fact in facts if isinstance(fact.data, DirectiveFact))
        for fact in facts:
            match fact.data:
                case ModelAnswered():
                    self._apply_answer(cast("Fact[ModelAnswered]", fact))
                case StimulusRecorded():
                    stimulus = decode_stimulus(cast("Fact[StimulusRecorded]", fact))
                    if isinstance(stimulus, Evaluated):
                        self.verdicts.setdefault(fact.name, []).append(stimulus)
                case OutputRecorded() | FailureRecorded() | ExitRecorded() | ItemOutputRecorded() as end:
                    self._apply_end(fact, end)
                case ItemsRecorded() as pulled:
                    self.items.apply(pulled)
                case GroupRecorded() as group:
                    self.groups.apply(group)
                case RunResumed(is_restart=is_restart):
                    if not is_restart:
                        self.drop_failures()
                    self.head.apply(fact)
                case _:
                    self.head.apply(fact)

    # Results.

    def outcome(self, key: str) -> RecordedOutcome:
        """Return the recorded outcome of work; UNKNOWN if the resumed run must repeat it."""
        position = position_of(key)
        if position is None:
            return RecordedOutcome(self._named.get(key, 0))
        codes = self._levels.get(position[0])
        return RecordedOutcome(0 if codes is None else codes[position[1]])

    def count(self, outcome: RecordedOutcome, level: int | None = None) -> int:
        """Return how much work of a level, or of all levels, has an outcome other than UNKNOWN."""
        levels = self._levels.values() if level is None else [self._levels[level]] if level in self._levels else []
        named = sum(each == outcome for each in self._named.values()) if level is None else 0
        return named + sum(codes.count(outcome) for codes in levels)

    def instance(self, key: str) -> str:
        """Return the execution that counts: the recorded one that ended, or else the current or next one."""
        return instance_of(key, occurrence=self._occurrences.get(key, 0))

    # Folding.

    def drop_failures(self) -> None:
        """Repeat, as another execution, the work that failed the run, as a `resume` does (S-MR-163, S-MR-155)."""
        for key in self._refused:
            self._set(key, RecordedOutcome.UNKNOWN)
            self._repeat(key)
        self._refused.clear()
        if self.head.state is not RunState.FAILED:
            return
        for level, codes in self._levels.items():
            # Failures that the run left out stay left out, since the reduces above were grouped without them.
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

    def _apply_answer(self, fact: Fact[ModelAnswered]) -> None:
        sent, received = int(fact.data.input_tokens), int(fact.data.output_tokens)
        self.input_tokens += max(sent, 0)
        self.output_tokens += max(received, 0)
        self.uncounted_calls += sent < 0 or received < 0
        if is_making_agent(fact):
            self.answers.setdefault(fact.name, []).append(fact)

    def _apply_end(self, fact: Fact, end: _End) -> None:
        key, _, occurrence = fact.name.rpartition("#")
        if "/" in fact.name:
            if is_inside_unit(fact.name):  # work that a task delegated belongs to it
                item = key_of(fact.name.partition("/")[0])
                self.answers.pop(effect_name(instance_of(f"{item}/{node_key(fact.name)}"), 0, _MAKING), None)
                if self._keep_inner is not None and not isinstance(fact.data, ExitRecorded):
                    self._keep_inner(item, cast("Fact[OutputRecorded] | Fact[FailureRecorded]", fact))
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
                if reason is not ExitReason.BUDGET_EXHAUSTED:  # a resumed run needs a larger budget
                    self._set(key, RecordedOutcome.EXITED)
                    self.exits[key] = reason

    def _set(self, key: str, outcome: RecordedOutcome) -> None:
        position = position_of(key)
        if position is not None:
            self._levels.setdefault(position[0], OutcomeArray())[position[1]] = outcome
        elif key in {FINAL, DIRECT}:
            self._named[key] = outcome


def fails_on_item(header: PlanRecorded) -> bool:
    """Return whether the first failed map ends the run (S-MR-150)."""
    rules = header.plan or {}
    chosen = rules.get("on_item_error")
    return chosen == "fail" if chosen is not None else rules.get("parallel_error_strategy") != "continue_on_error"


def refusal_of(head: RunHead) -> str:
    """Return why a dynamic run cannot be resumed and what to do instead; empty if it can (S-MR-163)."""
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
) -> MapReduceResumeReader:
    found = MapReduceResumeReader(keep, keep_failure)
    await read_pages(store, run_id, MAP_REDUCE_KINDS, found.apply)
    return found
