"""A job's log, told apart."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray.cli.commands.submit import JobLog, JobLogLine

MARK = "result-0123:"


@given(st.text(), st.integers(1, 7))
def test_a_result_arrives_as_it_was_written_however_the_log_is_cut(text: str, size: int) -> None:
    """S-CLU-14: line ends of every kind included, between other lines."""
    written = f"begun\n{MARK}{json.dumps(text)}\nended"
    log = JobLog(MARK)
    lines = [line for at in range(0, len(written), size) for line in log.feed(written[at : at + size])]
    lines += log.close()
    assert lines == [
        JobLogLine("begun", is_result=False),
        JobLogLine(text, is_result=True),
        JobLogLine("ended", is_result=False),
    ]


def test_a_result_behind_a_line_without_an_end_is_found() -> None:
    """S-CLU-14: a tool may have printed half a line."""
    assert list(JobLog(MARK).feed(f'half{MARK}"all"\n')) == [
        JobLogLine("half", is_result=False),
        JobLogLine("all", is_result=True),
    ]


def test_what_ray_says_of_the_job_is_left_out_and_the_mark_alone_is_no_result() -> None:
    """S-CLU-13, S-CLU-14."""
    text = f"2026-01-01 10:00:00,123\tINFO job_manager.py:581 -- Runtime env is setting up.\n{MARK} exec\n"
    assert list(JobLog(MARK).feed(text)) == [JobLogLine(f"{MARK} exec", is_result=False)]
