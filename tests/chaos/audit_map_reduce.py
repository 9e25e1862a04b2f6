"""Whether a map-reduce that was killed kept its promises: each item once in the tree, once in its files, never in both.

In: the record's facts, the rows and dead letters on the disk. Out: what was broken, in words. The tree is read from the
groups on record and walked anew here, not by the machine that is judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ensemble_ray.facts.fact import Fact
from tests.chaos.answers import marks_in

__all__ = ["judge_files", "judge_map_reduce", "judge_marks", "outcomes_in"]

_FINAL = "final-reduce"
#: What facts of a task end with, whatever came of it.
_ENDS = ("output", "task_failed")
_Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Tree:
    """The tree as the record has it."""

    #: indices of the items that were pulled
    items: Sequence[int]
    #: by key: what a reduce brings together
    groups: Mapping[str, Sequence[str]]
    #: by key: what a task gave, and which of them failed
    outputs: Mapping[str, Fact]
    failed: frozenset[str]


def judge_map_reduce(facts: Sequence[Fact], rows: Sequence[_Row], letters: Sequence[_Row]) -> list[str]:
    """What is wrong with a run that completed; nothing where it was no map-reduce whose tasks were made as it ran."""
    items = [index for fact in facts if fact.kind == "items" for index in _indices(fact)]
    if not items:
        return []
    tree = _Tree(
        items,
        {_key(fact): _inputs(fact) for fact in facts if fact.kind == "group"},
        {_key(fact): fact for fact in facts if fact.kind == "output"},
        frozenset(_key(fact) for fact in facts if fact.kind == "task_failed"),
    )
    return [
        *_of_groups(facts),
        *_of_the_tree(tree),
        *_of_items(tree, rows, letters),
        *judge_files(facts, rows, letters),
    ]


def judge_files(facts: Sequence[Fact], rows: Sequence[_Row], letters: Sequence[_Row]) -> list[str]:
    """What is wrong with rows and dead letters at any time, just after a kill too: nothing is there before its record."""
    outputs = {_key(fact): _output(fact) for fact in facts if fact.kind == "output"}
    failed = {_key(fact) for fact in facts if fact.kind == "task_failed"}
    found: list[str] = []
    for what, lines in (("row", rows), ("dead letter", letters)):
        counts = Counter(line["index"] for line in lines)
        found += [f"item {index} has {count} {what}s" for index, count in counts.items() if count > 1]
    for row in rows:
        output = outputs.get(f"map-{row['index']}")
        if output is None:
            found.append(f"item {row['index']} has a row, and its output is not recorded")
        elif output["raw"] != row["raw"]:
            found.append(f"the row of item {row['index']} is not the recorded output: {row['raw']}")
    for letter in letters:
        if f"map-{letter['index']}" not in failed and letter["attempts"]:
            found.append(f"item {letter['index']} has a dead letter, and its failure is not recorded")
    return found


def judge_marks(raw: str, rows: Sequence[_Row]) -> list[str]:
    """Whether the last answer was made of all outputs of items, of each once."""
    expected = Counter(mark for row in rows for mark in marks_in(str(row["raw"])))
    found = Counter(marks_in(raw))
    return [
        f"the last answer has the mark {mark} {found[mark]} times, and the outputs of items {expected[mark]} times"
        for mark in sorted({*expected, *found})
        if found[mark] != expected[mark] or found[mark] != 1
    ]


def outcomes_in(facts: Sequence[Fact], letters: Sequence[_Row], *, has_own_shape: bool) -> dict[str, object]:
    """What tasks gave, by key, and how items failed, by index; of a run with a shape of its own only what items gave."""
    if not any(fact.kind == "items" for fact in facts):
        return {}
    outputs = {_key(fact): _output(fact)["raw"] for fact in facts if fact.kind == "output"}
    # The message names the port of the run's own server.
    lost = {
        f"the dead letter of {each['index']}": (each["error_type"], each["message"].split(": ")[-1], each["attempts"])
        for each in letters
    }
    return {**{key: raw for key, raw in outputs.items() if not has_own_shape or key.startswith("map-")}, **lost}


def _of_groups(facts: Sequence[Fact]) -> Iterator[str]:
    """A group is on record before its reduce and after what it brings together, and is the same each time."""
    first: dict[str, Fact] = {}
    seen: set[str] = set()
    for fact in facts:
        key = _key(fact)
        if fact.kind == "group":
            known = first.setdefault(key, fact)
            if known.data != fact.data:
                yield f"'{key}' is recorded as another group: {fact.data.to_data()['inputs']} after {known.data.to_data()['inputs']}"
            for missing in [each for each in _inputs(fact) if each not in seen]:
                yield f"'{key}' was grouped before '{missing}', which it brings together, had its output"
        elif fact.kind == "output":
            seen.add(key)
        if fact.kind in {"model", *_ENDS} and key.startswith(("reduce-", "final-")) and key not in first:
            yield f"{fact.kind} of '{key}' is recorded before its group"


def _of_the_tree(tree: _Tree) -> Iterator[str]:
    """Every output is brought together with others once, but for the last one."""
    where: dict[str, list[str]] = {}
    for key, inputs in tree.groups.items():
        for each in inputs:
            where.setdefault(each, []).append(key)
    for key in tree.outputs:
        groups = where.pop(key, [])
        if key == _FINAL:
            if groups:
                yield f"the last output is in the groups {groups}"
        elif len(groups) != 1:
            yield f"the output of '{key}' is in {len(groups)} groups: {groups}"
    for key, groups in where.items():
        yield f"'{key}' is in the groups {groups}, and has no output"
    for key in tree.groups.keys() - tree.outputs.keys() - tree.failed:
        yield f"nothing came of the group '{key}'"
    if _FINAL not in tree.outputs:
        yield "there is no last output"


def _of_items(tree: _Tree, rows: Sequence[_Row], letters: Sequence[_Row]) -> Iterator[str]:
    """Every item has an output and a row, or a failure and a dead letter."""
    for index, count in Counter(tree.items).items():
        if count > 1:
            yield f"item {index} is recorded {count} times"
    with_row, with_letter = {row["index"] for row in rows}, {letter["index"] for letter in letters}
    for index in tree.items:
        key = f"map-{index}"
        has_output = key in tree.outputs
        if has_output and key in tree.failed:
            yield f"item {index} has an output and failed"
        if has_output is not (index in with_row):
            yield f"item {index} has {'an output and no row' if has_output else 'a row and no output'}"
        if has_output is (index in with_letter):
            yield f"item {index} has {'an output and a dead letter' if has_output else 'neither output nor dead letter'}"
    known = {f"map-{index}" for index in tree.items}
    for key in tree.outputs.keys() | tree.failed:
        if key.startswith("map-") and key not in known:
            yield f"'{key}' is recorded, and its item is not"
    for index in (with_row | with_letter) - set(tree.items):
        yield f"item {index} stands in a file, and was never pulled"


def _indices(fact: Fact) -> Sequence[int]:
    """The indices of the items that a fact tells of."""
    data = cast("_Row", fact.data.to_data())
    return data.get("indices") or range(data["first"], data["first"] + len(data["digests"]))


def _inputs(group: Fact) -> Sequence[str]:
    return cast("Sequence[str]", group.data.to_data()["inputs"])


def _output(fact: Fact) -> _Row:
    return cast("_Row", fact.data.to_data()["output"])


def _key(fact: Fact) -> str:
    """The key of the task that a fact belongs to."""
    return fact.name.partition("#")[0]
