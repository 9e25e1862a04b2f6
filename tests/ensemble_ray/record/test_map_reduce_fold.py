"""What the facts of a dynamic run give to whoever goes on with it."""

import gc
import tracemalloc
from collections.abc import Iterator, Sequence

import pytest

from ensemble_ray import ExitReason, RecordError, RunState
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import OutputRecorded
from ensemble_ray.record.identity.definition import FINAL, item_digest, reduce_key
from ensemble_ray.record.map_reduce_fold import (
    MAP_REDUCE_KINDS,
    MapReduceResumeReader,
    RecordedOutcome,
    fails_on_item,
    refusal_of,
)
from ensemble_ray.schedule.instructions import ReduceGroup

from .facts_of_dynamic_runs import DIGESTS, begun, done, failed, group, items_fact, pulled, resumed
from .facts_of_runs import RUN, ended, fact, model


def fold(*facts: Fact) -> MapReduceResumeReader:
    """What they tell."""
    found = MapReduceResumeReader()
    found.apply(facts)
    return found


# Going on.


def test_done_work_is_known_by_its_key() -> None:
    """S-MR-161: outputs are handed on as they pass by, under their keys, and not kept."""
    kept: list[tuple[str, str]] = []
    lost: list[str] = []

    def keep(key: str, end: OutputRecorded) -> None:
        kept.append((key, str(end.output_data()["raw"])))

    found = MapReduceResumeReader(keep, lambda key, _: lost.append(key))
    found.apply([begun("collect"), pulled(3), done("map-2#0", "two"), failed("map-0#0")])
    found.apply([group("reduce-1-0", 1, 0, "map-2"), done("reduce-1-0#0", "r"), done("final-reduce#0", "f")])
    keys = ("map-0", "map-1", "map-2", "reduce-1-0", "reduce-1-1", FINAL, "direct")
    assert [found.outcome(key).name for key in keys] == [
        "FAILED", "UNKNOWN", "COMPLETED", "COMPLETED", "UNKNOWN", "COMPLETED", "UNKNOWN",
    ]  # fmt: skip
    assert kept == [("map-2", "two"), ("reduce-1-0", "r"), (FINAL, "f")]
    assert lost == ["map-0"]
    assert (
        found.count(RecordedOutcome.COMPLETED),
        found.count(RecordedOutcome.COMPLETED, 0),
        found.count(RecordedOutcome.FAILED),
    ) == (3, 1, 1)
    assert (found.head.state, found.head.started_at) == (RunState.INTERRUPTED, 100.0)


def test_groups_are_given_in_their_order() -> None:
    """S-MR-161: with their inputs in order; one that is recorded twice is the first one."""
    found = fold(
        begun(), pulled(5),
        group("reduce-1-0", 1, 0, "map-3", "map-1"), group("reduce-1-1", 1, 1, "map-0"),
        group("reduce-1-0", 1, 0, "map-4"), group(FINAL, 2, 0, "reduce-1-0", "reduce-1-1"),
    )  # fmt: skip
    first = ReduceGroup(level=1, number=0, inputs=((0, 3), (0, 1)))
    last = ReduceGroup(level=2, number=0, inputs=((1, 0), (1, 1)), is_final=True)
    assert list(found.groups) == [first, ReduceGroup(level=1, number=1, inputs=((0, 0),)), last]
    assert found.groups.final == last
    assert found.groups[:1] == [first]
    assert len(found.groups) == 3
    with pytest.raises(IndexError):
        found.groups[3]


def test_interrupted_run_does_not_try_failed_maps_again() -> None:
    """S-MR-163: whatever was to become of them; what was begun and has no end goes on as the execution that it was."""
    found = fold(begun("skip"), pulled(3), failed("map-1#0"), model("map-2#0", 0, 104.0))
    found.drop_failures()
    assert found.outcome("map-1") is RecordedOutcome.FAILED
    assert [found.instance(f"map-{n}") for n in range(3)] == ["map-0#0", "map-1#0", "map-2#0"]


def test_failed_run_tries_again_what_it_failed_for() -> None:
    """S-MR-163: as another execution of the same task; what is done stays done."""
    found = fold(begun(), pulled(3), done("map-0#0"), failed("map-1#0"), failed("map-2#0"), ended(106, "failed"))
    assert (refusal_of(found.head), found.outcome("map-1"), found.head.state) == (
        "",
        RecordedOutcome.FAILED,
        RunState.FAILED,
    )
    found.drop_failures()
    assert [found.outcome(f"map-{n}") for n in range(3)] == [
        RecordedOutcome.COMPLETED,
        RecordedOutcome.UNKNOWN,
        RecordedOutcome.UNKNOWN,
    ]
    assert [found.instance(f"map-{n}") for n in range(3)] == ["map-0#0", "map-1#1", "map-2#1"]


def test_later_execution_counts() -> None:
    """S-MR-163: it was resumed, and killed in the middle of trying again; then it failed again, and is resumed again."""
    history = [begun(), pulled(2), failed("map-0#0"), failed("map-1#0"), ended(106, "failed"), resumed()]
    killed = fold(*history, done("map-0#1"))
    killed.drop_failures()
    assert (killed.outcome("map-0"), killed.outcome("map-1")) == (RecordedOutcome.COMPLETED, RecordedOutcome.UNKNOWN)
    assert killed.instance("map-1") == "map-1#1"
    again = fold(*history, failed("map-1#1"), ended(112, "failed"))
    assert again.outcome("map-1") is RecordedOutcome.FAILED
    again.drop_failures()
    assert again.instance("map-1") == "map-1#2"


@pytest.mark.parametrize("is_of_callable", [False, True])
def test_refused_item_is_repeated_unless_its_handler_was_refused(*, is_of_callable: bool) -> None:
    """S-MR-155: a handler may have done its work once; a resume takes its failure as the run did."""
    error = {"type": "PaymentError", "text": "no credit", "fields": {"status": 402}}
    more = {"is_of_callable": True} if is_of_callable else {}
    failure = fact("task_failed", "map-0#0", 105.0, error_type="PaymentError", message="", error=error, **more)
    found = fold(begun("collect"), pulled(1), failure)
    found.drop_failures()
    assert found.outcome("map-0") is (RecordedOutcome.FAILED if is_of_callable else RecordedOutcome.UNKNOWN)


def test_restart_of_a_scheduler_forgives_nothing() -> None:
    """S-MR-163: nobody wished to go on after the failure."""
    restart = fact("resume", "run", 104.0, is_restart=True)
    found = fold(begun("skip"), pulled(1), failed("map-0#0"), restart)
    assert found.outcome("map-0") is RecordedOutcome.FAILED


@pytest.mark.parametrize(
    ("rules", "is_fail"),
    [
        ({"on_item_error": "fail"}, True),
        ({"on_item_error": "collect"}, False),
        ({"on_item_error": None, "parallel_error_strategy": "fail_fast"}, True),
        ({"on_item_error": None, "parallel_error_strategy": "continue_on_error"}, False),
    ],
)
def test_what_becomes_of_failed_items_is_as_recorded(rules: dict[str, object], *, is_fail: bool) -> None:
    """S-MR-150: where nothing is said, as the error strategy says."""
    assert fails_on_item(fold(fact("plan", "run", 100.0, plan=rules, items={})).head.header) is is_fail


def test_left_out_maps_stay_left_out_when_a_reduce_failed_the_run() -> None:
    """S-MR-163, S-MR-104: the final reduce is tried again; the maps and reduces that it went on without are not."""
    found = fold(
        begun("collect"), pulled(3), failed("map-0#0"), done("map-1#0"),
        group("reduce-1-0", 1, 0, "map-1"), failed("reduce-1-0#0"), group("reduce-1-1", 1, 1, "map-2"),
        done("reduce-1-1#0"), group(FINAL, 2, 0, "reduce-1-1"), failed("final-reduce#0"), ended(106, "failed"),
    )  # fmt: skip
    assert refusal_of(found.head) == ""
    found.drop_failures()
    assert [found.outcome(key).name for key in ("map-0", "reduce-1-0", FINAL)] == ["FAILED", "FAILED", "UNKNOWN"]
    assert found.instance(FINAL) == "final-reduce#1"


def test_whole_level_that_failed_is_tried_again() -> None:
    """S-MR-163, S-MR-104: no output was left there."""
    found = fold(begun("skip"), pulled(1), done("map-0#0"), failed("reduce-1-0#0"), ended(106, "failed"))
    found.drop_failures()
    assert found.instance("reduce-1-0") == "reduce-1-0#1"


def test_run_all_of_whose_maps_failed_is_refused() -> None:
    """S-MR-163, S-MR-102: they were left out as was asked for; the text says what can be done."""
    end = fact("end", "run", 106.0, state="failed", failure="all_maps")
    assert "DeadLetters" in refusal_of(fold(begun("collect"), pulled(1), failed("map-0#0"), end).head)
    assert refusal_of(fold(begun("fail"), pulled(1), failed("map-0#0"), end).head) == ""
    assert refusal_of(fold(begun("collect"), pulled(1), failed("map-0#0")).head) == ""


def test_early_end_is_known_with_its_reason() -> None:
    """S-MR-161, S-BUD-6: but one for a spent budget is none: with a larger one there is more to do."""
    spent, left = ({"reason": reason.value} for reason in (ExitReason.BUDGET_EXHAUSTED, ExitReason.TIMEOUT))
    found = fold(
        begun(), pulled(2), fact("task_exited", "map-0#0", 1.0, **spent), fact("task_exited", "map-1#0", 1.0, **left)
    )
    assert (found.outcome("map-0"), found.outcome("map-1")) == (RecordedOutcome.UNKNOWN, RecordedOutcome.EXITED)
    assert found.exits == {"map-1": ExitReason.TIMEOUT}


def test_recorded_calls_count_as_spent() -> None:
    """S-BUD-7: also those of work that failed, was interrupted, or was handed on, which is no work of its own."""
    unknown = fact("model", "map-1#0/1/model", 105.0, input_tokens=7, output_tokens=-1)
    handed = "map-0#0/0/call-0/delegate#0"
    found = fold(begun(), pulled(2), model("map-0#0", 0, 103), model(handed, 0, 104), done(handed), unknown)
    assert (found.input_tokens, found.output_tokens, found.uncounted_calls) == (207, 40, 1)
    assert found.count(RecordedOutcome.COMPLETED) == 0


def test_answers_that_made_agents_are_kept_until_their_work_ended() -> None:
    """S-SET-46, S-MR-161: whoever goes on with the work does not ask again; there may be a hundred thousand."""
    made = [fact("model", f"map-{n}#0/0/synthesis", 102.0, text=f"agent {n}") for n in range(3)]
    found = fold(begun("skip"), pulled(3), *made, done("map-0#0"), failed("map-1#0"))
    assert {name: [each.data.to_data()["text"] for each in facts] for name, facts in found.answers.items()} == {
        "map-2#0/0/synthesis": ["agent 2"]
    }


# Items.


def test_items_are_known_by_their_index() -> None:
    """S-MR-162: the hash of each; none of those that are not compared or were not pulled."""
    found = fold(begun(), pulled(2), items_fact(RUN, 102.0, indices=[2, 3], digests=[DIGESTS[2], ""])).items
    assert found.count == 4
    assert [found.digest(index) for index in range(5)] == [*DIGESTS[:3], "", None]
    assert [found.number(index) for index in (0, 3, 4)] == [0, 3, None]


def test_items_of_dead_letters_keep_their_indices() -> None:
    """S-MR-126: the machine counts them as they are pulled; their keys have the indices that they had."""
    items = items_fact(RUN, 102.0, indices=[7, 2, 400_000, 3], digests=DIGESTS[:4])
    found = fold(begun(), items, done("map-400000#0"), group("reduce-1-0", 1, 0, "map-2", "map-400000"))
    assert [found.items.index(number) for number in range(4)] == [7, 2, 400_000, 3]
    assert [found.items.number(index) for index in (7, 2, 400_000, 3, 8)] == [0, 1, 2, 3, None]
    assert [found.items.digest(index) for index in (7, 2, 400_000, 3)] == DIGESTS[:4]
    assert found.outcome("map-400000") is RecordedOutcome.COMPLETED
    assert found.groups[0].inputs == ((0, 1), (0, 2))


def test_item_that_was_pulled_again_is_what_it_was_last() -> None:
    """S-MR-162: a run that was allowed to go on with other items; in both ways of counting them."""
    row = fold(begun(), pulled(3), items_fact(RUN, 102.0, indices=[1], digests=[DIGESTS[9]])).items
    some = fold(
        begun(), items_fact(RUN, 1.0, indices=[5, 1], digests=DIGESTS[:2]),
        items_fact(RUN, 2.0, indices=[5], digests=[DIGESTS[9]]),
    ).items  # fmt: skip
    assert (row.count, row.digest(1), row.digest(2)) == (3, DIGESTS[9], DIGESTS[2])
    assert (some.count, some.digest(5), some.digest(1)) == (2, DIGESTS[9], DIGESTS[1])


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("items", {"first": 0, "digests": ["no hash"]}),
        ("items", {"digests": [DIGESTS[0]]}),
        ("items", {"indices": [1, 2], "digests": [DIGESTS[0]]}),
        ("group", {"level": 0, "number": 0, "inputs": ["map-0"]}),
        ("group", {"level": 1, "number": 0, "inputs": []}),
        ("group", {"level": 1, "number": 0, "inputs": ["final-reduce"]}),
    ],
)
def test_damage_is_told(kind: str, data: dict[str, object]) -> None:
    """S-MR-161: nothing is guessed."""
    with pytest.raises(RecordError, match="The record is damaged"):
        fold(fact(kind, "run", 1.0, **data))


def test_group_of_an_item_that_is_not_recorded_is_damage() -> None:
    """S-MR-161: its items stand before it in the record."""
    found = fold(begun(), group("reduce-1-0", 1, 0, "map-0"))
    with pytest.raises(RecordError, match="'map-0'"):
        list(found.groups)


# Memory.


def _facts(count: int, chunk: int, indices: Sequence[int]) -> Iterator[list[Fact]]:
    """A run of that many items, in pages."""
    yield [begun()]
    for first in range(0, count, 100):
        some = indices[first : first + 100]
        yield [items_fact(RUN, 1.0, indices=some, digests=[item_digest(index) for index in some])]
        yield [done(f"map-{index}#0") for index in some]
    for number in range(count // chunk):
        inputs = [f"map-{indices[number * chunk + place]}" for place in range(chunk)]
        yield [group(reduce_key(1, number), 1, number, *inputs), done(f"{reduce_key(1, number)}#0")]


@pytest.mark.heavy
@pytest.mark.parametrize("step", [1, 3])
def test_item_takes_at_most_64_bytes(step: int) -> None:
    """S-MR-132, S-MR-161: with a group for every two of them, which is the most; whether or not indices have gaps."""
    count = 2_500
    indices = range(0, step * count, step)
    pages = list(_facts(count, 2, indices))
    kept: list[str] = []
    found = MapReduceResumeReader(lambda key, _: kept.append(key))
    gc.freeze()  # looking through all that a session has loaded takes seconds
    tracemalloc.start()
    try:
        for page in pages:
            found.apply(page)
        assert len(kept) == count + count // 2
        kept.clear()
        assert found.items.number(indices[-1]) == count - 1
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size / count <= 64
    assert (found.count(RecordedOutcome.COMPLETED, 0), len(found.groups)) == (count, count // 2)
    assert found.groups[-1].inputs == ((0, count - 2), (0, count - 1))


def test_fold_reads_only_what_it_looks_at() -> None:
    """S-MR-161: calls of tools, and prompts in them, may be large."""
    assert set(MAP_REDUCE_KINDS) == {
        "plan",
        "interruption",
        "resume",
        "end",
        "items",
        "group",
        "item_output",
        "stimulus",
        "model",
        "output",
        "task_failed",
        "task_exited",
        "directive",
        "model_switched",
    }
