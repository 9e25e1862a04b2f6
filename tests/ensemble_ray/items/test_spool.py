"""Bodies outside of memory, and sequences that read them when asked."""

import json
import pickle
import threading
import tracemalloc
from array import array
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ray import EnsembleOutput, ExecutionTrace, IllegalStateError, TaskOutput, TaskTrace, ValidationError
from ensemble_ray.items.line_file import Spool, SpooledSequence
from ensemble_ray.values.value import utc_of

OUTPUTS = [
    TaskOutput(raw=raw, task_description="d", agent_role="r", completed_at=utc_of(1), duration=timedelta(seconds=1))
    for raw in "abc"
]
TRACES = [
    TaskTrace(
        task_description=text,
        expected_output="e",
        agent_role="r",
        started_at=utc_of(1),
        completed_at=utc_of(2),
        duration=timedelta(seconds=1),
    )
    for text in ("one\ntwo", "\ud83d", "")
]


def _spooled(values: Sequence[Any], what: str = "values") -> SpooledSequence[Any]:
    spool = Spool()
    order = array("Q", [spool.put(pickle.dumps(value)) for value in values])
    return SpooledSequence(spool, order, pickle.loads, what=what)


def _trace(task_traces: Sequence[TaskTrace]) -> ExecutionTrace:
    return ExecutionTrace(
        ensemble_id="e",
        workflow="map",
        started_at=utc_of(1),
        completed_at=utc_of(2),
        total_duration=timedelta(seconds=1),
        task_traces=task_traces,
        metadata={"task_traces": []},
    )


@settings(max_examples=60)
@given(bodies=st.lists(st.binary(max_size=40), max_size=12), data=st.data())
def test_bodies_come_back_when_asked_for_in_any_order(bodies: list[bytes], data: st.DataObject) -> None:
    """S-MR-132: puts and gets may be mixed; an empty body is one too."""
    spool, kept = Spool(), list[bytes]()
    for body in bodies:
        assert spool.put(body) == len(kept)
        kept.append(body)
        place = data.draw(st.integers(0, len(kept) - 1))
        assert spool.get(place) == kept[place]
    assert (len(spool), [spool.get(place) for place in range(len(kept))]) == (len(bodies), bodies)
    spool.close()


@pytest.mark.heavy
def test_bodies_stay_out_of_memory_when_there_are_many() -> None:
    """S-MR-132: at most 16 bytes of memory for each, however large they are, beyond the first eight megabytes."""
    spool, body = Spool(), b"x" * 2_000
    for _ in range(5_000):
        spool.put(body)
    tracemalloc.start()
    for _ in range(20_000):
        spool.put(body)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 20_000 * 16
    assert spool.get(24_999) == body
    spool.close()


def test_bodies_are_whole_when_threads_put_and_get_at_once() -> None:
    """S-MR-132: readers and the run use it side by side."""
    spool, wrong = Spool(), list[bytes]()

    def work(mark: bytes) -> None:
        for number in range(200):
            body = mark * (number + 1)
            if (found := spool.get(spool.put(body))) != body:
                wrong.append(found)

    several = [threading.Thread(target=work, args=(mark,)) for mark in (b"a", b"b", b"c")]
    for each in several:
        each.start()
    for each in several:
        each.join()
    assert (wrong, len(spool)) == ([], 600)


def test_spool_refuses_what_it_does_not_have() -> None:
    """S-MR-132: a slot that was never given, and any once it is closed."""
    spool = Spool()
    spool.put(b"a")
    for slot in (1, -1):
        with pytest.raises(IndexError, match="of 1"):
            spool.get(slot)
    spool.close()
    with pytest.raises(IllegalStateError, match="The spool is closed"):
        spool.get(0)
    with pytest.raises(IllegalStateError, match="The spool is closed"):
        spool.put(b"b")


def test_sequence_compares_with_any_other() -> None:
    """S-MR-132: lists, tuples, its own kind, from either side."""
    values = ["a", 1, None]
    spooled = _spooled(values)
    assert spooled == values
    assert values == spooled
    assert tuple(values) == spooled
    assert spooled == _spooled(values)
    assert spooled != ["a", 1]
    assert spooled != ["a", 1, 2]
    assert _spooled(["a"]) != "a"
    assert hash(spooled) == hash(tuple(values))


def test_sequence_is_used_like_a_list() -> None:
    """S-MR-132: places from both ends, slices, membership, its order; what it prints is short."""
    spooled = _spooled(list(range(5)), "outputs")
    assert (spooled[0], spooled[-1], len(spooled)) == (0, 4, 5)
    assert (spooled[1:4], spooled[::-2], list(reversed(spooled))) == ([1, 2, 3], [4, 2, 0], [4, 3, 2, 1, 0])
    assert 3 in spooled
    assert spooled.index(3) == 3
    with pytest.raises(IndexError):
        spooled[5]
    assert repr(spooled) == "<SpooledSequence of 5 outputs>"
    assert repr(SpooledSequence(Spool(), range(100_000), bytes, what="outputs")).startswith(
        "<SpooledSequence of 100,000"
    )


def test_sequence_is_whole_when_it_was_pickled() -> None:
    """S-MR-132: whoever gets it has no file of ours; it still compares with lists and is read when asked."""
    spooled = _spooled([1, "b"], "letters")
    packed = pickle.dumps(spooled)
    del spooled
    there = pickle.loads(packed)  # noqa: S301  our own bytes
    assert there == [1, "b"]
    assert there == (1, "b")
    assert repr(there) == "<SpooledSequence of 2 letters>"
    assert pickle.loads(pickle.dumps(there)) == there  # noqa: S301  our own bytes


def test_output_keeps_its_sequence_when_copied() -> None:
    """S-MR-132: a field keeps it as it is; copies, JSON and pickles say what they say of a list."""
    spooled, plain = EnsembleOutput(task_outputs=_spooled(OUTPUTS)), EnsembleOutput(task_outputs=OUTPUTS)
    kept = spooled.task_outputs
    assert isinstance(kept, SpooledSequence)
    assert spooled.replace(raw="x").task_outputs is kept
    assert (spooled, spooled.last_completed_output) == (plain, OUTPUTS[-1])
    assert spooled.model_dump() == plain.model_dump()
    assert spooled.model_dump_json() == plain.model_dump_json()
    assert pickle.loads(pickle.dumps(spooled)) == plain  # noqa: S301  our own bytes
    with pytest.raises(ValidationError, match="task_outputs"):
        spooled.replace(task_outputs=["no output"])


def test_trace_keeps_its_sequence_when_written(tmp_path: Path) -> None:
    """S-MR-132, S-TRC-50: the JSON of a trace is the same, written whole or task by task, and it reads back."""
    spooled, plain = _trace(_spooled(TRACES)), _trace(TRACES)
    assert isinstance(spooled.task_traces, SpooledSequence)
    assert isinstance(plain.task_traces, tuple)
    assert spooled.to_json() == plain.to_json()
    assert len(ExecutionTrace.model_validate(json.loads(spooled.to_json())).task_traces) == 3
    for each in (spooled, plain, _trace(())):
        each.write_json(tmp_path / "new" / "trace.json")
        assert (tmp_path / "new" / "trace.json").read_text(encoding="utf-8") == each.to_json()
    whole = _trace(_spooled(TRACES[:1]))
    assert ExecutionTrace.model_validate_json(whole.to_json()) == whole
