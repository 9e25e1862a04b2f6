"""Draws the state diagrams of tasks, loops, phases and branches, and the table of a manager's refusals.

The input are the transition tables of the scheduling machines, and answers of the machine of a manager's rules. The script writes the
parts of docs/architecture.md, docs/units.md and docs/hierarchical.md between their markers. A test compares the pages with its output.

    python docs/make_diagrams.py            write the pages
    python docs/make_diagrams.py --check    check that the pages are up to date
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, TypeVar

from ensemble_ray.plan.plan import HierarchyRules
from ensemble_ray.schedule.graph import BRANCH_TRANSITIONS, BranchState
from ensemble_ray.schedule.hierarchy import DelegationEnforcer
from ensemble_ray.schedule.loop import LOOP_TRANSITIONS, LoopState
from ensemble_ray.schedule.machine import TRANSITIONS, TaskState
from ensemble_ray.schedule.phases import PHASE_TRANSITIONS, PhaseState

PAGE = Path(__file__).with_name("architecture.md")
UNITS_PAGE = Path(__file__).with_name("units.md")
RULES_PAGE = Path(__file__).with_name("hierarchical.md")
BEGIN = "<!-- {name}, drawn by docs/make_diagrams.py: begin -->"
END = "<!-- {name}, drawn by docs/make_diagrams.py: end -->"


class Table(NamedTuple):
    """States, with a line for each in their docstring, and the transitions between them."""

    states: type[StrEnum]
    #: (from, to, why)
    arrows: list[tuple[str, str, str]]


_State = TypeVar("_State", bound=StrEnum)
_Event = TypeVar("_Event", bound=StrEnum)


def _by_event(transitions: Mapping[tuple[_State, _Event], _State]) -> list[tuple[str, str, str]]:
    """Return one arrow for each pair of states, with all its events."""
    events: dict[tuple[str, str], list[str]] = {}
    for (before, event), after in transitions.items():
        events.setdefault((before, after), []).append(event)
    return [(before, after, " / ".join(why)) for (before, after), why in events.items()]


#: By the name in the markers of the page.
TABLES = {
    "tasks": Table(TaskState, [(before, after, why) for (before, after), why in TRANSITIONS.items()]),
    "loops": Table(LoopState, _by_event(LOOP_TRANSITIONS)),
    "phases": Table(PhaseState, _by_event(PHASE_TRANSITIONS)),
    "branches": Table(BranchState, _by_event(BRANCH_TRANSITIONS)),
}


def state_diagram(name: str) -> str:
    """Return the states and their transitions as a Mermaid block."""
    table = TABLES[name]
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(table.states))}"]
    lines += [f"    {before} --> {after}: {why}" for before, after, why in table.arrows]
    left = {before for before, _, _ in table.arrows}
    lines += [f"    {state} --> [*]" for state in table.states if state not in left]
    return "\n".join(["```mermaid", *lines, "```"])


def state_table(name: str) -> str:
    """Return a table of the states and their meanings, from the docstring of their class."""
    table = TABLES[name]
    meanings = dict(re.findall(r"^ *`(\w+)` +(.+)$", table.states.__doc__ or "", flags=re.MULTILINE))
    rows = [f"| `{state}` | {meanings[state]} |" for state in table.states]
    return "\n".join(["| State | Meaning |", "|---|---|", *rows])


#: In the order of the checks: the text of a rule, its meaning, the rule, and the number of earlier approvals.
_RULES: tuple[tuple[str, str, HierarchyRules, int], ...] = (
    (
        '`allowed_workers=["Researcher"]`',
        "only these workers may be asked; empty: all of them",
        HierarchyRules(allowed_workers=("Researcher",)),
        0,
    ),
    (
        "`global_max_delegations=2`",
        "at most this many delegations in the run; 0: no cap",
        HierarchyRules(global_max_delegations=2),
        2,
    ),
    (
        '`max_calls_per_worker={"Writer": 2}`',
        "at most this many delegations to that worker",
        HierarchyRules(max_calls_per_worker={"Writer": 2}),
        2,
    ),
    (
        '`required_stages=[["Researcher"], ["Writer"]]`',
        "all workers of a stage must succeed before a worker of a later stage is asked",
        HierarchyRules(required_stages=(("Researcher",), ("Writer",))),
        0,
    ),
)


def rules_table() -> str:
    """Return each constraint with the sentence that the manager's model gets when it asks for the writer against it."""
    rows = ["| Constraint | Meaning | Result for the model |", "|---|---|---|"]
    for written, meaning, rules, approved in _RULES:
        enforcer = DelegationEnforcer(rules, ["Researcher", "Writer"])
        for _ in range(approved):
            enforcer.approve("Writer")
        rows.append(f"| {written} | {meaning} | `Delegation rejected by policy: {enforcer.approve('Writer')}` |")
    return "\n".join(rows)


def redraw(page: str) -> str:
    """Return the page of a task's states with its drawn part replaced.

    Raises:
        ValueError: the page has lost its markers.
    """
    return _between(page, _states("tasks"), PAGE, "tasks")


def redraw_units(page: str) -> str:
    """Return the page of the units with its drawn parts replaced.

    Raises:
        ValueError: the page has lost its markers.
    """
    for name in ("loops", "phases", "branches"):
        page = _between(page, _states(name), UNITS_PAGE, name)
    return page


def _states(name: str) -> str:
    return f"{state_diagram(name)}\n\n{state_table(name)}"


def redraw_rules(page: str) -> str:
    """Return the page of the rules with its drawn part replaced.

    Raises:
        ValueError: the page has lost its markers.
    """
    return _between(page, rules_table(), RULES_PAGE, "rules")


def _between(page: str, part: str, file: Path, name: str) -> str:
    begin_mark, end_mark = BEGIN.format(name=name), END.format(name=name)
    before, begin, rest = page.partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not begin or not end:
        msg = f"{file.name}: the markers are gone; put them back: {begin_mark} ... {end_mark}"
        raise ValueError(msg)
    return f"{before}{begin_mark}\n\n{part}\n\n{end_mark}{after}"


def main(arguments: list[str]) -> int:
    """Write the pages, or check them."""
    for file, draw in ((PAGE, redraw), (UNITS_PAGE, redraw_units), (RULES_PAGE, redraw_rules)):
        page = file.read_text(encoding="utf-8")
        wanted = draw(page)
        if "--check" not in arguments:
            file.write_text(wanted, encoding="utf-8")
        elif wanted != page:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
