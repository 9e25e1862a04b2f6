"""The pictures of the documentation are drawn from the tables that the code obeys."""

import importlib.util
from enum import StrEnum
from types import ModuleType

import pytest

from ensemble_ray.schedule.graph import BRANCH_TRANSITIONS, BranchState
from ensemble_ray.schedule.loop import LOOP_TRANSITIONS, LoopState
from ensemble_ray.schedule.machine import TRANSITIONS, TaskState
from ensemble_ray.schedule.phases import PHASE_TRANSITIONS, PhaseState
from tests.architecture.project import ROOT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script that draws them, loaded from its file."""
    spec = importlib.util.spec_from_file_location("make_diagrams", ROOT / "docs/make_diagrams.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_what_the_script_draws(script: ModuleType) -> None:
    """A changed table changes the page in the same commit: python docs/make_diagrams.py."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert script.redraw(page) == page
    page = (ROOT / "docs/units.md").read_text(encoding="utf-8")
    assert script.redraw_units(page) == page


@pytest.mark.parametrize(
    ("name", "states", "pairs"),
    [
        ("tasks", TaskState, list(TRANSITIONS)),
        ("loops", LoopState, [(before, after) for (before, _), after in LOOP_TRANSITIONS.items()]),
        ("phases", PhaseState, [(before, after) for (before, _), after in PHASE_TRANSITIONS.items()]),
        ("branches", BranchState, [(before, after) for (before, _), after in BRANCH_TRANSITIONS.items()]),
    ],
)
def test_every_transition_is_in_the_picture(
    script: ModuleType, name: str, states: type[StrEnum], pairs: list[tuple[str, str]]
) -> None:
    """Each pair of the table is an arrow, each state a row; nothing else is drawn."""
    arrows = [line for line in script.state_diagram(name).splitlines() if " --> " in line and "[*]" not in line]
    assert [line.strip().partition(":")[0] for line in arrows] == list(dict.fromkeys(f"{a} --> {b}" for a, b in pairs))
    assert len(script.state_table(name).splitlines()) == 2 + len(states)


def test_rules_of_a_manager_are_what_its_machine_says(script: ModuleType) -> None:
    """S-HIER-71 to S-HIER-74: the table of the page, one row for each check, in their order."""
    page = (ROOT / "docs/hierarchical.md").read_text(encoding="utf-8")
    assert script.redraw_rules(page) == page
    rows = script.rules_table().splitlines()[2:]
    assert [row.count("Delegation rejected by policy: ") for row in rows] == [1] * 4
    assert not any("None" in row for row in rows)


def test_page_without_markers_is_refused(script: ModuleType) -> None:
    """A lost marker would let the picture go stale in silence."""
    with pytest.raises(ValueError, match="markers are gone"):
        script.redraw("# Architecture")
