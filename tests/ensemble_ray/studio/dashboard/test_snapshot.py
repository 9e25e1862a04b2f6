"""What a page that joins late is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ensemble_ray.events.messages import Message
from ensemble_ray.studio.dashboard import hub as snapshot_module
from ensemble_ray.studio.dashboard.hub import Sent, Snapshot, encode


class Filled(Snapshot):
    """A snapshot that says what it has."""

    def tell(self, kind: str, run: str = "r1", **data: object) -> None:
        """Add a message."""
        text = encode(kind, {"run_id": run, **data})
        self.add(Sent(run_id=run, message=Message(kind, dict(data)), text=text))

    def begin(self, run: str) -> None:
        """Add the start of a run."""
        self.tell("ensemble_started", run, started_at=f"at {run}")

    @property
    def said(self) -> dict[str, Any]:
        """What it says first."""
        found: dict[str, Any] = json.loads(self.hello()())
        return found

    @property
    def kinds(self) -> list[str]:
        """Type and run of what is stored."""
        return [f"{each['type']} {each['run_id']}" for each in self.said.get("snapshot_trace", [])]


def filled(most_runs: int = 10, most_iterations: int = 2) -> Filled:
    """Return one without messages."""
    return Filled(most_runs=most_runs, most_iterations=most_iterations)


def test_the_first_message_without_runs() -> None:
    """S-WEB-41: what is empty is left out; S-WEB-43: nothing is stored before a run starts."""
    snapshot = filled()
    snapshot.tell("task_started")
    snapshot.tell("tool_called")
    assert snapshot.said == {"type": "hello"}


def test_what_is_stored() -> None:
    """S-WEB-41, S-WEB-42: each as it was sent, in order; not what is of a moment."""
    snapshot = filled()
    snapshot.begin("r1")
    for kind in ("task_started", "token", "llm_iteration_started", "task_input", "heartbeat", "task_completed"):
        snapshot.tell(kind, instance="a#0", n=1)
    snapshot.tell("ensemble_completed")
    assert snapshot.kinds == [
        "ensemble_started r1",
        "task_started r1",
        "task_input r1",
        "task_completed r1",
        "ensemble_completed r1",
    ]
    assert snapshot.said["snapshot_trace"][1] == {"type": "task_started", "run_id": "r1", "instance": "a#0", "n": 1}
    assert (snapshot.said["ensemble_id"], snapshot.said["started_at"]) == ("r1", "at r1")


def test_the_newest_runs_are_kept() -> None:
    """S-WEB-43: the one that began first is dropped whole, and nothing more of it is stored."""
    snapshot = filled(most_runs=2)
    for run in ("r1", "r2", "r3"):
        snapshot.begin(run)
        snapshot.tell("task_started", run)
    snapshot.tell("task_completed", "r1")
    assert snapshot.kinds == ["ensemble_started r2", "task_started r2", "ensemble_started r3", "task_started r3"]
    assert snapshot.said["ensemble_id"] == "r3"


def test_runs_at_the_same_time() -> None:
    """S-WEB-13, S-WEB-41: everything in the order in which it was sent."""
    snapshot = filled()
    snapshot.begin("r1")
    snapshot.begin("r2")
    snapshot.tell("task_started", "r1")
    snapshot.tell("task_started", "r2")
    snapshot.tell("task_completed", "r1")
    assert snapshot.kinds == [
        "ensemble_started r1",
        "ensemble_started r2",
        "task_started r1",
        "task_started r2",
        "task_completed r1",
    ]


def test_reviews_are_stored_while_they_are_open() -> None:
    """S-WEB-42, S-WEB-60: in their place; also one that comes before its run is heard of."""
    snapshot = filled()
    snapshot.tell("review_requested", review_id="early")
    snapshot.begin("r1")
    snapshot.tell("review_requested", review_id="a")
    snapshot.tell("task_started")
    snapshot.tell("review_requested", review_id="b")
    requested = [each.get("review_id") for each in snapshot.said["snapshot_trace"]]
    assert requested == ["early", None, "a", None, "b"]
    snapshot.tell("review_timed_out", review_id="b")
    snapshot.tell("review_decided", review_id="early")
    assert snapshot.kinds == ["ensemble_started r1", "review_requested r1", "task_started r1", "review_decided r1"]


def iterations(snapshot: Filled) -> list[list[object]]:
    """Return the pairs: which of the two there is, and of which request."""
    return [[f"{name} {each[name]['n']}" for name in each] for each in snapshot.said.get("recent_iterations", [])]


def test_requests_to_models_are_kept_aside() -> None:
    """S-WEB-44: the last pairs of each task; one that goes on has only `started`; cleared when a run starts."""
    snapshot = filled(most_iterations=2)
    snapshot.begin("r1")
    for number in range(3):
        snapshot.tell("llm_iteration_started", instance="a#0", n=number)
        snapshot.tell("llm_iteration_completed", instance="a#0", n=number)
    snapshot.tell("llm_iteration_started", instance="b#0", n=7)
    assert iterations(snapshot) == [["started 1", "completed 1"], ["started 2", "completed 2"], ["started 7"]]
    snapshot.begin("r2")
    assert iterations(snapshot) == []


def test_requests_to_models_of_many_tasks() -> None:
    """S-WEB-62: of the hundred tasks that were heard of last."""
    snapshot = filled()
    snapshot.begin("r1")
    for number in range(250):
        snapshot.tell("llm_iteration_started", instance=f"{number}#0", n=number)
    snapshot.tell("llm_iteration_completed", instance="150#0", n=150)
    kept = iterations(snapshot)
    assert len(kept) == 100
    assert kept[0] == ["started 151"]
    assert kept[-1] == ["started 150", "completed 150"]


def test_requests_to_models_that_nobody_wants() -> None:
    """S-WEB-44: 0 turns it off."""
    snapshot = filled(most_iterations=0)
    snapshot.begin("r1")
    snapshot.tell("llm_iteration_started", instance="a#0", n=1)
    assert "recent_iterations" not in snapshot.said


def test_texts_of_others_in_the_first_message() -> None:
    """S-WEB-30: whatever stands in texts, it is one JSON object in UTF-8."""
    snapshot = filled()
    snapshot.begin("r1")
    snapshot.tell("tool_called", tool_result='</script>"\u2028\ud83d half \x00', structured_result={"a": [1, None]})
    shown = snapshot.said["snapshot_trace"][1]
    assert shown["tool_result"] == '</script>"\u2028\ufffd half \x00'
    snapshot.hello()().encode()


def test_what_is_stored_of_one_run_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-WEB-66: its beginning and what came last; another run keeps what it has."""
    monkeypatch.setattr(snapshot_module, "MOST_CHARACTERS", 1000)
    snapshot = filled()
    snapshot.begin("other")
    snapshot.tell("task_started", "other", n=0)
    snapshot.begin("r1")
    for number in range(100):
        snapshot.tell("task_started", n=number)
    stored = snapshot.said["snapshot_trace"]
    assert [each["run_id"] for each in stored[:2]] == ["other", "other"]
    assert stored[2]["type"] == "ensemble_started"
    kept = [each["n"] for each in stored[3:]]
    assert kept == list(range(100 - len(kept), 100))
    assert 0 < len(kept) < 40
    snapshot.tell("task_completed", text="x" * 2000)
    assert [each["type"] for each in snapshot.said["snapshot_trace"][2:]] == ["ensemble_started", "task_completed"]


def test_the_first_message_is_what_was_added_until_it_was_asked_for() -> None:
    """S-WEB-45: what comes while it is written is not in it."""
    snapshot = filled()
    snapshot.begin("r1")
    write = snapshot.hello()
    snapshot.tell("task_started")
    assert [each["type"] for each in json.loads(write())["snapshot_trace"]] == ["ensemble_started"]
