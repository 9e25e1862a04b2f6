"""The section `schedules` of a team file."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ensemble_ray import Schedule, ValidationError
from ensemble_ray.teamfile import load_runnable

TEAM = """
llm: openai:any
tasks:
  report: {description: "Report {topic} {day}"}
schedules:
"""


def load(directory: Path, lines: str) -> object:
    """The schedules of a file with these lines."""
    file = directory / "team.yaml"
    file.write_text(TEAM + lines, encoding="utf-8")
    return load_runnable(str(file), needs_keys=False).schedules


def test_a_file_declares_what_a_program_does(tmp_path: Path) -> None:
    """S-SCH-7: the same values under the same names."""
    lines = """
  nightly: {cron: 0 3 * * MON-FRI, timezone: Europe/Berlin, inputs: {topic: 1.10}, overlap: queue, missed: all, input: day}
  poll: {every: 15m, tags: {kind: short}}
  inbox: {folder: /srv/inbox, pattern: "*.pdf", input: topic, attach: true, changed: run}
"""
    assert load(tmp_path, lines) == {
        "nightly": Schedule(
            cron="0 3 * * MON-FRI",
            timezone="Europe/Berlin",
            inputs={"topic": "1.10"},
            overlap="queue",
            missed="all",
            input="day",
        ),
        "poll": Schedule(every=timedelta(minutes=15), tags={"kind": "short"}),
        "inbox": Schedule(folder="/srv/inbox", pattern="*.pdf", input="topic", attach=True, changed="run"),
    }


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("  a: {cron: 0 3 * *}", ":6:6: schedules.a: Schedule cron '0 3 * *' must have five fields"),
        ("  a: {evry: 15m}", "unknown key of schedule 'a'. Did you mean 'every'?"),
        ("  a: {every: 15}", ":6:14: schedules.a.every: must be text"),
        ("  a: {every: 15m, overlap: wait}", "schedules.a.overlap: unknown overlap 'wait'"),
        ("  - {every: 15m}", "must be a mapping of names to schedules"),
        ("  a b: {every: 15m}", "a name must have 1 to 64 letters"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, line: str, problem: str) -> None:
    """S-SCH-7."""
    with pytest.raises(ValidationError) as refused:
        load(tmp_path, line)
    assert problem in str(refused.value)
