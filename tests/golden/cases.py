"""Which runs the golden records are of. In: nothing. Out: each case with how it came about; no run is made here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

__all__ = ["CASES", "RUNTIMES", "Case", "cases_of"]

RUNTIMES = ("inline", "ray")

#: How a run came to its end: by itself; its processes were killed; somebody cancelled it; it was resumed after a kill, or
#: is a fork of another one.
How = Literal["ended", "killed", "cancelled", "resumed", "forked"]

_WITH_UNITS = ("looped", "phased", "branched")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    #: name of a function of `module`
    team: str
    end: str
    how: How = "ended"
    #: where it was killed or cancelled: a question to a model, or the name of a tool
    point: str = ""
    #: what models answer otherwise
    answers: Mapping[str, object] = field(default_factory=dict[str, object])
    #: of a fork: the task that it begins from
    from_task: str = ""
    #: of a resumed run or a fork: the end of the run that it goes on with
    of: str = ""
    runtime: str = "inline"

    @property
    def module(self) -> str:
        """Where its team is defined."""
        return f"tests.golden.{'unit_teams' if self.team in _WITH_UNITS else 'teams'}"

    @property
    def make(self) -> Callable[[], Any]:
        """What makes its team."""
        return getattr(importlib.import_module(self.module), self.team)

    @property
    def name(self) -> str:
        """Its name; cases of both runtimes have the same."""
        return f"{self.team}-{self.end}"

    @property
    def run_id(self) -> str:
        """The id of its run; a resumed run has that of the killed one."""
        return f"{self.team}-{self.of}" if self.how == "resumed" else self.name

    @property
    def inputs(self) -> Mapping[str, object]:
        """What the run was begun with."""
        return {"topic": "tides"} if self.team in {"sequential", "planned_file"} else {}

    @property
    def is_of_file(self) -> bool:
        """Whether its team is found again by the path in the record."""
        return self.team.endswith("_file")


_FAILURE = ValueError("no answer")
_MANAGER = "Manager|Get these tasks done by your agents:"


def _killed(team: str, point: str, end: str = "killed") -> Case:
    return Case(team=team, end=end, how="killed", point=point)


def _cancelled(team: str, point: str) -> Case:
    return Case(team=team, end="cancelled", how="cancelled", point=point)


def _failed(team: str, end: str = "failed", **answers: object) -> Case:
    return Case(team=team, end=end, answers=answers)


_TEAMS = (
    "sequential",
    "parallel",
    "hierarchical",
    "nested",
    "checked",
    "structured",
    "tools",
    "streaming",
    "synthesized",
    "provider",
    *_WITH_UNITS,
    "mapping",
    "strict_mapping",
    "chunked",
    "adaptive",
    "pipelined",
    "direct",
    "planned_file",
    "mapped_file",
)
CASES: tuple[Case, ...] = (
    *(Case(team=team, end="finished") for team in _TEAMS),
    Case(team="parallel_errors", end="failed"),
    Case(team="early_exit", end="exited"),
    Case(team="budget", end="exhausted"),
    _failed("sequential", **{"Writer|Write about tides|0": _FAILURE}),
    _failed("parallel", **{"Writer|step c|0": _FAILURE}),
    _failed("hierarchical", **{f"{_MANAGER}|1": "I give up"}),
    _failed("checked", **{"Reviewer|Review it|0": "bad words"}),
    _failed("structured", **{"Geographer||0": "Still a city"}),
    _failed("phased", **{"Editor|Collect it|0": _FAILURE}),
    _failed("branched", **{"Writer|Go right|0": _FAILURE}),
    _failed("strict_mapping", **{"Agent|map {'word': 'kelp'}|0": _FAILURE}),
    _failed("chunked", **{"Mapper|map 6|0": _FAILURE}),
    _failed("adaptive", **{"Reducer|reduce map 6 (0)+map 7 (0)|0": _FAILURE}),
    _failed("mapping", "hopeless", **{f"Mapper|map {number}|0": _FAILURE for number in range(1, 6)}),
    _killed("sequential", "Editor|Outline tides for children|0"),
    _killed("parallel", "Writer|step c|0"),
    _killed("parallel_errors", "Writer|errors c|0"),
    _killed("hierarchical", "Writer|write|0"),
    _killed("hierarchical", "pay", "killed_in_tool"),
    _killed("nested", "Payer|pay|1"),
    _killed("nested", "pay", "killed_in_tool"),
    _killed("checked", "count_letters"),
    _killed("checked", "Reviewer|Review it|1", "killed_in_retry"),
    _killed("structured", "Geographer||0"),
    _killed("tools", "pay"),
    _killed("tools", "stamp", "killed_in_idempotent"),
    _killed("strict_tools", "pay"),
    _killed("early_exit", "Clerk|Leave|0"),
    _killed("budget", "Writer|spend 1|0"),
    _killed("streaming", "Writer|Say two|0"),
    _killed("synthesized", "Historian|Tell of Athens|0"),
    _killed("provider", "order"),
    _killed("looped", "is_refined 2"),
    _killed("phased", "Writer|Sum it up|0"),
    _killed("branched", "Writer|Go right|0"),
    _killed("mapping", "Mapper|map 4|0"),
    _killed("strict_mapping", "Agent|map {'word': 'kelp'}|0"),
    _killed("chunked", "Reducer|reduce map 6+map 7|0"),
    _killed("adaptive", "Reducer|reduce map 8 (0)+map 9 (0)|0"),
    _killed("pipelined", "Mapper|map 7|0"),
    _killed("direct", "Reader|Read all of ['one', 'two']|1"),
    _killed("planned_file", "Poet|Rhyme about tides|0"),
    _killed("mapped_file", "Reader|What is said of salt?|0"),
    _cancelled("sequential", "Editor|Outline tides for children|0"),
    _cancelled("parallel", "Writer|step c|0"),
    _cancelled("hierarchical", "Writer|write|0"),
    _cancelled("mapping", "Mapper|map 4|0"),
    _cancelled("adaptive", "Reducer|reduce map 8 (0)+map 9 (0)|0"),
    *(
        Case(team=team, end="resumed", how="resumed", of="killed")
        for team in (
            *(
                "sequential",
                "hierarchical",
                "nested",
                "checked",
                "tools",
                "strict_tools",
                "looped",
                "phased",
                "branched",
            ),
            *("mapping", "adaptive"),
        )
    ),
    Case(team="sequential", end="forked", how="forked", of="failed", from_task="task-3"),
    Case(team="parallel", end="forked", how="forked", of="killed", from_task="c"),
    Case(team="looped", end="forked", how="forked", of="finished", from_task="loop:refine#1"),
    Case(team="branched", end="forked", how="forked", of="failed", from_task="graph:desk#1"),
    Case(team="synthesized", end="forked", how="forked", of="finished", from_task="task-2"),
)
#: Those of the others that there are of Ray too.
_ON_RAY = frozenset(
    {
        "sequential-finished",
        "synthesized-finished",
        "mapping-finished",
        "parallel_errors-failed",
        "checked-failed",
        "early_exit-exited",
        "budget-exhausted",
        "parallel-cancelled",
        "tools-resumed",
        "adaptive-resumed",
        "parallel-forked",
    }
)


def cases_of(runtime: str) -> tuple[Case, ...]:
    """Return the cases as runs of a runtime; on Ray not all of those that are whole, which differ in few fields."""
    chosen = CASES if runtime == "inline" else [case for case in CASES if case.how == "killed" or case.name in _ON_RAY]
    return tuple(replace(case, runtime=runtime) for case in chosen)
