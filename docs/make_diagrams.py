"""Draws what pages show of the machines: a task's states, and what a manager is refused.

In: the table of states that the scheduling machines obey, and what the machine of a manager's rules answers. Out: the
parts of docs/architecture.md and docs/hierarchical.md between their markers. What is drawn from the code cannot be wrong
about it; a test compares the pages with what this script draws.

    python docs/make_diagrams.py            write the pages
    python docs/make_diagrams.py --check    say whether the pages are what would be written
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ensemble_ray.plan.plan import HierarchyRules
from ensemble_ray.schedule import states
from ensemble_ray.schedule.hierarchy import DelegationEnforcer
from ensemble_ray.schedule.loop_states import LOOP_TRANSITIONS, LoopState
from ensemble_ray.schedule.states import TRANSITIONS, TaskState

PAGE = Path(__file__).with_name("architecture.md")
RULES_PAGE = Path(__file__).with_name("hierarchical.md")
BEGIN = "<!-- drawn by docs/make_diagrams.py: begin -->"
END = "<!-- drawn by docs/make_diagrams.py: end -->"


def state_diagram() -> str:
    """Return the states and their transitions as a Mermaid block."""
    lines = ["stateDiagram-v2", f"    [*] --> {TaskState.PENDING}"]
    lines += [f"    {before} --> {after}: {why}" for (before, after), why in TRANSITIONS.items()]
    lines += [f"    {state} --> [*]" for state in TaskState if state.is_resolved]
    return "\n".join(["```mermaid", *lines, "```"])


def state_table() -> str:
    """Return a table of what each state means, in the words of the module that defines the states."""
    meanings = dict(re.findall(r"^`(\w+)` +(.+)$", states.__doc__ or "", flags=re.MULTILINE))
    rows = [f"| `{state}` | {meanings[state]} |" for state in TaskState]
    return "\n".join(["| State | Meaning |", "|---|---|", *rows])


#: In the order of the checks: how a rule is written, what it means, the rule itself, and what was approved before.
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


def loop_diagram() -> str:
    """Return the states of a loop and their transitions as a Mermaid block."""
    lines = ["stateDiagram-v2", f"    [*] --> {LoopState.PENDING}"]
    lines += [f"    {before} --> {after}: {event}" for (before, event), after in LOOP_TRANSITIONS.items()]
    lines += [f"    {state} --> [*]" for state in LoopState if state.is_over]
    return "\n".join(["```mermaid", *lines, "```"])


def rules_table() -> str:
    """Return each constraint with the sentence that the manager's model gets when it asks for the writer against it."""
    rows = ["| Constraint | Meaning | Result for the model |", "|---|---|---|"]
    for written, meaning, rules, approved in _RULES:
        enforcer = DelegationEnforcer(rules, ["Researcher", "Writer"])
        for _ in range(approved):
            enforcer.approve("Writer")
        rows.append(f"| {written} | {meaning} | `Delegation rejected by policy: {enforcer.approve('Writer')}` |")
    return "\n".join(rows)


def drawn(page: str) -> str:
    """Return the page of the states with its drawn part made anew.

    Raises:
        ValueError: the page has lost its markers.
    """
    parts = [
        state_diagram(),
        state_table(),
        "The states of a loop, from the table that is its machine:",
        loop_diagram(),
    ]
    return _between(page, "\n\n".join(parts), PAGE)


def drawn_rules(page: str) -> str:
    """Return the page of the rules with its drawn part made anew.

    Raises:
        ValueError: the page has lost its markers.
    """
    return _between(page, rules_table(), RULES_PAGE)


def _between(page: str, part: str, file: Path) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        msg = f"{file.name}: the markers are gone; put them back: {BEGIN} ... {END}"
        raise ValueError(msg)
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Write the pages, or check them."""
    for file, draw in ((PAGE, drawn), (RULES_PAGE, drawn_rules)):
        page = file.read_text(encoding="utf-8")
        wanted = draw(page)
        if "--check" not in arguments:
            file.write_text(wanted, encoding="utf-8")
        elif wanted != page:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
