"""Log fields and services that travel with a piece of work."""

import asyncio
import logging

import pytest

from ensemble_ray import LogContextFilter
from ensemble_ray.ports import Services, services, use_services
from ensemble_ray.process.context import current_log_context, log_context


class Nothing:
    """Stands where no service is called."""


NONE = Services(limiter=Nothing(), cpu=Nothing())  # type: ignore[arg-type]


def _filtered() -> logging.LogRecord:
    record = logging.LogRecord("ensemble_ray.x", logging.INFO, __file__, 1, "text", None, None)
    assert LogContextFilter().filter(record)
    return record


def test_fields_are_on_records_when_set() -> None:
    """S-ENG-21, S-SET-6, S-ENG-23, S-ENG-24, S-ENG-25, S-ENG-26: attributes with underscores, and one dict."""
    fields = {"ensemble.id": "run-1", "task.index": "1/2", "task.description": "Write", "agent.role": "Writer"}
    with log_context(fields):
        record = _filtered()
    assert {name.replace("_", ".", 1): vars(record)[name] for name in ("ensemble_id", "task_index", "agent_role")} == {
        "ensemble.id": "run-1",
        "task.index": "1/2",
        "agent.role": "Writer",
    }
    assert vars(record)["task_description"] == "Write"
    assert vars(record)["ensemble_context"] == fields


def test_records_pass_when_there_are_no_fields() -> None:
    """S-ENG-21: the filter never drops a line."""
    assert vars(_filtered())["ensemble_context"] == {}


def test_outer_fields_are_not_seen_when_the_inner_ones_are_all() -> None:
    """S-ENG-20, S-DEL-60: and come back."""
    with log_context({"task.index": "1/1"}):
        with log_context({"agent.role": "Writer"}, is_whole=True):
            assert current_log_context() == {"agent.role": "Writer"}
        assert current_log_context() == {"task.index": "1/1"}


def test_inner_fields_are_added_and_taken_away() -> None:
    """S-ENG-20: the outer ones stay, the caller's are as before."""
    with log_context({"ensemble.id": "run-1"}):
        with log_context({"agent.role": "Writer"}):
            assert current_log_context() == {"ensemble.id": "run-1", "agent.role": "Writer"}
        assert current_log_context() == {"ensemble.id": "run-1"}
    assert current_log_context() == {}


def test_fields_are_gone_when_the_block_failed() -> None:
    """S-ENG-20, S-ENG-2: also on failure."""
    with pytest.raises(ValueError, match="broken"), log_context({"ensemble.id": "run-1"}):
        raise ValueError("broken")
    assert current_log_context() == {}


def test_record_keeps_its_fields_when_the_context_changes() -> None:
    """S-ENG-21: the dict is the record's own."""
    with log_context({"ensemble.id": "run-1"}):
        record = _filtered()
    assert vars(record)["ensemble_context"] == {"ensemble.id": "run-1"}


async def test_tasks_do_not_see_each_others_fields() -> None:
    """S-PAR-16: work that runs at the same time has its own fields."""
    both_set = asyncio.Barrier(2)

    async def work(role: str) -> str:
        with log_context({"agent.role": role}):
            await both_set.wait()
            return current_log_context()["agent.role"]

    assert await asyncio.gather(work("Writer"), work("Editor")) == ["Writer", "Editor"]


def test_services_are_those_of_the_work_in_hand() -> None:
    """S-CONV-33: shared things are reached without being handed along; none outside a run."""
    assert services() is None
    with use_services(NONE):
        assert services() is NONE
    assert services() is None
