"""How many calls may be on their way after an endpoint asked for fewer (S-DUR-65)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ensemble_ray.llm.limits.breaker import AdaptiveLimit


def lowered(sent: int) -> AdaptiveLimit:
    """A limit after the first refusal, with so many calls on their way."""
    limit = AdaptiveLimit()
    assert limit.record_refusal(sent, limit.generation)
    return limit


def test_any_number_may_go_when_nothing_was_refused() -> None:
    """S-DUR-65: there is no limit from the start."""
    limit = AdaptiveLimit()
    assert limit.limit is None
    assert limit.allows(10_000)


def test_the_calls_on_their_way_are_halved_when_one_is_refused() -> None:
    """S-DUR-65: at least 1."""
    assert [lowered(sent).limit for sent in (64, 7, 2, 1)] == [32, 3, 1, 1]
    assert [lowered(64).allows(sent) for sent in (31, 32)] == [True, False]


def test_the_limit_is_lowered_once_when_a_whole_crowd_is_refused() -> None:
    """S-DUR-65: those sent before it was lowered belong to the same crowd; those sent after do not."""
    limit = AdaptiveLimit()
    before = limit.generation
    assert [limit.record_refusal(64 - n, before) for n in range(3)] == [True, False, False]
    assert limit.limit == 32
    assert limit.record_refusal(20, limit.generation)
    assert limit.limit == 10


def test_one_more_may_go_when_as_many_as_the_limit_were_answered() -> None:
    """S-DUR-65: additive increase."""
    limit = lowered(4)
    seen = []
    for _ in range(9):
        limit.record_answer(wanted=100)
        seen.append(limit.limit)
    assert seen == [2, 3, 3, 3, 4, 4, 4, 4, 5]


def test_the_limit_is_lifted_when_it_hinders_nobody() -> None:
    """S-DUR-65: when it exceeds what is asked for."""
    limit = lowered(2)
    limit.record_answer(wanted=2)
    assert limit.limit == 2
    limit.record_answer(wanted=2)
    limit.record_answer(wanted=2)
    assert limit.limit is None
    limit.record_answer(wanted=0)
    assert limit.limit is None


def test_the_calls_here_are_halved_when_another_process_was_refused() -> None:
    """S-DUR-65: in every process; once for a crowd that is spread over them."""
    limit = AdaptiveLimit()
    limit.record_remote_refusal(8)
    assert limit.limit == 4
    limit.record_remote_refusal(4)
    assert limit.limit == 4
    limit.record_answer(wanted=9)
    limit.record_remote_refusal(4)
    assert limit.limit == 2


def test_nothing_is_limited_when_no_call_is_on_its_way_here() -> None:
    """S-DUR-65: there is nothing to halve."""
    limit = AdaptiveLimit()
    limit.record_remote_refusal(0)
    assert limit.limit is None


@given(steps=st.lists(st.tuples(st.sampled_from(["refused", "elsewhere", "answered"]), st.integers(1, 100))))
def test_some_call_may_always_go_when_anything_happened(steps: list[tuple[str, int]]) -> None:
    """S-DUR-65: the limit is at least 1, rises by 1 only, and falls by half of what it was at most."""
    limit = AdaptiveLimit()
    for kind, number in steps:
        before = limit.limit
        match kind:
            case "refused":
                limit.record_refusal(number, limit.generation)
                assert limit.limit is not None
                assert limit.limit <= max(1, number // 2)
            case "elsewhere":
                limit.record_remote_refusal(number)
            case _:
                limit.record_answer(wanted=number)
                assert before is None or limit.limit in {before, before + 1, None}
        assert limit.allows(0)
        if before is not None and limit.limit is not None and kind != "answered":
            assert limit.limit <= before
