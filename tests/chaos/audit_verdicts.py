"""Whether predicates and conditions were asked as was promised: once, and never again when their verdict was on record.

In: the facts of a run, and the lines that predicates left. Out: what was broken, in words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import StimulusRecorded
from tests.chaos.kills import Kill, all_slipped

__all__ = ["judge_verdicts", "question_of_edge", "question_of_loop"]


def question_of_loop(name: str, iteration: int) -> str:
    """Return what a predicate's line calls a question."""
    return f"loop:{name} {iteration}"


def question_of_edge(number: int) -> str:
    """Return what a condition's line calls the n-th question of its graph."""
    return f"edge {number}"


def judge_verdicts(facts: Sequence[Fact], asked: Sequence[Mapping[str, Any]], kills: Sequence[Kill]) -> Iterator[str]:
    """Return what is wrong; `asked` are the lines of predicates, oldest first."""
    recorded: dict[str, list[Fact]] = defaultdict(list)
    for name, fact in _verdicts_in(facts):
        recorded[name].append(fact)
    for name, of_it in recorded.items():
        if len(of_it) > 1:
            yield f"the verdict of '{name}' is recorded {len(of_it)} times"
    times: dict[str, list[float]] = defaultdict(list)
    for line in asked:
        times[line["verdict"]].append(line["at"])
    for name, at in times.items():
        if name not in recorded:
            yield f"'{name}' was asked, and no verdict of it is recorded"
        else:
            yield from _judge_times(name, at, recorded[name][0].at, kills)
    for name in recorded.keys() - times.keys():
        if not any(kill.is_loss for kill in kills):
            yield f"a verdict of '{name}' is recorded, and nobody was asked"


def _judge_times(name: str, times: Sequence[float], taken_at: float, kills: Sequence[Kill]) -> Iterator[str]:
    late = [at for at in times if at > taken_at]
    if late and not all_slipped(late, kills):
        yield f"'{name}' was asked {late[0] - taken_at:.4f} s after its verdict was taken"
    for earlier, later in pairwise(times):
        if not any(kill.explains(earlier, later) for kill in kills):
            yield f"'{name}' was asked twice, and no kill between explains it"


def _verdicts_in(facts: Sequence[Fact]) -> Iterator[tuple[str, Fact]]:
    edges: dict[object, int] = {}
    for fact in facts:
        if not isinstance(fact.data, StimulusRecorded) or fact.data.type != "Evaluated":
            continue
        data = fact.data.fields
        if data["question"] == "until":
            yield f"{str(data['unit']).rpartition('/')[2]} {data['iteration']}", fact
        elif data["question"] == "edge":
            yield question_of_edge(edges.setdefault(data["step"], len(edges) + 1)), fact
