"""Which process a run joins, and when it gets one of its own."""

from __future__ import annotations

from ensemble_ray.plan.placement import MOST_RUNS, SharedProcess, choose_shared


def process(name: str, runs: int = 1, *, tasks: int = 0, of: str = "") -> SharedProcess:
    """One that so many runs have."""
    return SharedProcess(
        name=name, runs=frozenset([*(f"{name}-{each}" for each in range(runs)), *of.split()]), tasks=tasks
    )


def test_first_run_gets_a_new_process() -> None:
    """S-CLU-70: there is none to share."""
    assert choose_shared("r", [], most=4) is None


def test_new_process_is_begun_as_long_as_there_may_be_more() -> None:
    """S-CLU-70: few runs hold up no other, and work on all processors."""
    assert choose_shared("r", [process("a"), process("b")], most=3) is None


def test_run_joins_the_process_that_has_least_to_do() -> None:
    """S-CLU-70: a run that has no task yet counts as one, so that runs that begin at the same time spread."""
    assert choose_shared("r", [process("a", 2), process("b", 1), process("c", 1, tasks=5)], most=3) == "b"


def test_number_of_processes_is_bounded_when_hundreds_of_runs_begin() -> None:
    """S-CLU-70: 200 runs at once take four processes where there may be four, as many each."""
    runs: dict[str, set[str]] = {}
    for number in range(200):
        known = [SharedProcess(name=name, runs=frozenset(having), tasks=0) for name, having in runs.items()]
        name = choose_shared(f"r{number}", known, most=4) or f"p{len(runs)}"
        runs.setdefault(name, set()).add(f"r{number}")
    assert [len(having) for having in runs.values()] == [50] * 4


def test_run_gets_a_new_process_when_all_are_full() -> None:
    """S-CLU-70: no run waits for a place."""
    assert choose_shared("r", [process("a", MOST_RUNS)], most=1) is None


def test_run_gets_no_process_twice() -> None:
    """S-CLU-70: its groups of processes stay apart, also beyond the number that there may be."""
    assert choose_shared("r", [process("a", of="r"), process("b", 9)], most=1) == "b"
    assert choose_shared("r", [process("a", of="r")], most=1) is None
