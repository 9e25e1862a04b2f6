"""The judge itself: a harness that never finds anything would prove nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.testing import ServedRequest
from tests.chaos.audit import Audit, audit, difference
from tests.chaos.kills import Kill
from tests.chaos.moments import moments
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.victims import VICTIMS
from tests.chaos.world import key_of

RUN = "r"
KILL = Kill(victim="process", at=10.0, repeats_calls=True, when="")


def fact(kind: str, name: str, at: float, **data: object) -> Fact:
    """A fact without its number."""
    return read_fact(run=RUN, kind=kind, name=name, at=at, data=data)


def numbered(*facts: Fact, epochs: Sequence[int] = ()) -> list[Fact]:
    """Facts as a store gives them."""
    given = epochs or [0] * len(facts)
    return [
        read_fact(run=RUN, kind=each.kind, name=each.name, at=each.at, data=each.data.to_data(), epoch=epoch, seq=seq)
        for seq, (each, epoch) in enumerate(zip(facts, given, strict=True), start=1)
    ]


def request(effect: str, at: float, body: bytes = b"{}") -> ServedRequest:
    """A request of a model call."""
    headers = {"idempotency-key": key_of(RUN, effect)}
    return ServedRequest("/v1/chat/completions", headers, body, arrived_at=at)


def line(effect: str, tool: str = "append_line", text: str = "t") -> Mapping[str, str]:
    """What a tool left."""
    return {"tool": tool, "key": key_of(RUN, effect), "text": text}


ASKED = "s0#0/0/model"
CALLED = "s0#0/0/call-0"
ANSWERED = fact("model", ASKED, 12.0)
INTENT, RESULT = fact("tool_intent", CALLED, 9.0), fact("tool_result", CALLED, 12.0, outcome="success")
UNKNOWN = fact("tool_result", CALLED, 12.0, outcome="unknown")


def judged(
    *facts: Fact,
    requests: Sequence[ServedRequest] = (),
    lines: Sequence[Mapping[str, str]] = (),
    kills: Sequence[Kill] = (KILL,),
    epochs: Sequence[int] = (),
) -> Audit:
    """What the judge says."""
    return audit(RUN, numbered(*facts, epochs=epochs), requests, lines, kills)


def test_a_call_may_be_repeated_once_for_each_kill_in_which_it_was_on_its_way() -> None:
    """S-DUR-37."""
    found = judged(ANSWERED, requests=[request(ASKED, 9), request(ASKED, 11)])
    assert (found.violations, found.repeats_in_flight, found.repeats_of_recorded) == ([], 1, 0)


def test_a_schedulers_death_lasts_until_another_goes_on() -> None:
    """S-DUR-32: agents outlive their scheduler; what they ask meanwhile is asked again under the next one."""
    requests = [request(ASKED, 10.5), request(ASKED, 11.5)]
    assert judged(fact("resume", "run", 11), ANSWERED, requests=requests).violations == []
    assert judged(ANSWERED, fact("resume", "run", 12.5), requests=requests[:1]).violations == []
    assert judged(ANSWERED, requests=requests).violations == [
        f"request '{ASKED}' was sent twice, and no kill between explains it"
    ]


@pytest.mark.parametrize(
    ("requests", "kills", "expected"),
    [
        pytest.param([(9, b"{}"), (13, b"{}")], [KILL], "after its answer was taken", id="recorded"),
        pytest.param([(11, b"{}"), (11.5, b"{}")], [KILL], "no kill between explains it", id="no kill"),
        pytest.param([(9, b"{}"), (11, b"[]")], [KILL], "not the same each time", id="another body"),
        pytest.param(
            [(9, b"{}"), (11, b"{}")],
            [Kill(victim="hub", at=10, repeats_calls=False, when="")],
            "no kill between explains it",
            id="a victim that repeats nothing",
        ),
        pytest.param(
            [(9, b"{}"), (11, b"{}")],
            [Kill(victim="process", at=10, repeats_calls=True, when="", settled={key_of(RUN, ASKED): 1})],
            "was recorded when process died",
            id="settled",
        ),
    ],
)
def test_a_repeated_call_is_found(
    requests: Sequence[tuple[float, bytes]], kills: Sequence[Kill], expected: str
) -> None:
    """S-DUR-37: asked again though recorded, or without a reason."""
    found = judged(ANSWERED, requests=[request(ASKED, at, body) for at, body in requests], kills=kills)
    assert any(expected in each for each in found.violations), found.violations


def test_a_call_without_key_or_record_is_found() -> None:
    """S-DUR-27, S-DUR-3: every request has a key, and every answer that a run went on from is recorded."""
    bare = ServedRequest("/v1/chat/completions", {}, b"{}", arrived_at=1)
    found = judged(requests=[bare, request(ASKED, 1)])
    assert found.violations[0] == "1 requests carry no Idempotency-Key"
    assert "no answer of it is recorded" in found.violations[1]


def test_an_effect_that_was_done_and_recorded_once_is_fine() -> None:
    """S-DUR-22, S-DUR-23: also one of unknown outcome, done or not."""
    assert judged(INTENT, RESULT, lines=[line(CALLED)]).violations == []
    for lines in ([], [line(CALLED)]):
        found = judged(INTENT, UNKNOWN, lines=lines)
        assert (found.violations, found.unknown_outcomes) == ([], 1)


@pytest.mark.parametrize(
    ("facts", "lines", "expected"),
    [
        pytest.param([INTENT, RESULT], [line(CALLED)] * 2, "was done 2 times", id="twice"),
        pytest.param([INTENT, RESULT], [line(CALLED), line("x", text="t")], "was done 2 times", id="another key"),
        pytest.param([INTENT, RESULT], [], "it was never done", id="never"),
        pytest.param([RESULT], [line(CALLED)], "without its intent", id="no intent"),
        pytest.param([INTENT], [line(CALLED)], "has no result", id="no result"),
        pytest.param(
            [INTENT, RESULT],
            [line(CALLED, "put"), line("x", "put")],
            "was called under the keys",
            id="a repetition under another key",
        ),
        pytest.param([INTENT, RESULT, RESULT], [line(CALLED)], "is recorded 2 times", id="recorded twice"),
    ],
)
def test_a_broken_effect_is_found(facts: Sequence[Fact], lines: Sequence[Mapping[str, str]], expected: str) -> None:
    """S-DUR-22, S-DUR-23: done twice, never, unrecorded, or under a second key."""
    found = judged(*facts, lines=lines)
    assert any(expected in each for each in found.violations), found.violations


def test_an_unknown_outcome_without_a_kill_is_found() -> None:
    """S-DUR-23: nobody may be told that an outcome is unknown when the process lived."""
    assert "no kill explains it" in judged(INTENT, UNKNOWN, kills=[]).violations[0]


def test_a_fact_of_an_older_epoch_is_found() -> None:
    """S-DUR-16: who was replaced writes no more."""
    found = judged(INTENT, RESULT, lines=[line(CALLED)], epochs=[1, 0])
    assert found.violations == ["fact 2 (tool_result s0#0/0/call-0) was taken under epoch 0 after 1"]


def test_a_fact_of_an_earlier_owner_is_found() -> None:
    """S-DUR-16: of whatever kind it is."""
    resumed, note = fact("resume", "run", 10), fact("stimulus", "run", 11)
    assert "the run's owner of 10000" in judged(resumed, note, epochs=[10_000, 0]).violations[0]
    assert judged(resumed, note, epochs=[10_000, 10_000]).violations == []


def test_one_call_may_slip_from_each_process_that_wakes_when_it_was_replaced() -> None:
    """S-DUR-16, S-DUR-37: what it was about to ask when it was frozen; no second one, and none without a freeze."""
    zombie = Kill(victim="frozen process", at=10.0, repeats_calls=True, when="", until=14.0, is_zombie=True)
    sent = [request(ASKED, 9), request(ASKED, 13)]
    found = judged(ANSWERED, requests=sent, kills=[zombie])
    assert (found.violations, found.slipped) == ([], 1)
    assert "after its answer was taken" in judged(ANSWERED, requests=sent).violations[0]
    found = judged(ANSWERED, requests=[*sent, request(ASKED, 13.5)], kills=[zombie])
    assert (found.slipped, found.repeats_of_recorded) == (0, 2)


def test_an_effect_whose_intent_was_lost_must_be_told_of() -> None:
    """S-DUR-86: it was done, nothing of it is on record any more, and who goes on is told that its outcome is unknown."""
    lost = Kill(victim="process", at=10.0, repeats_calls=True, when="", until=11.0, is_loss=True)
    done = [{**line(CALLED), "at": 9.5}]
    loss = fact("loss", "run", 11)
    found = judged(loss, UNKNOWN, lines=done, kills=[lost])
    assert (found.violations, found.unknown_outcomes) == ([], 1)
    assert "nobody is told of it" in judged(loss, lines=done, kills=[lost]).violations[0]


def test_an_output_that_differs_is_found() -> None:
    """S-DUR-38: texts and counts, not times."""
    names = ("input_tokens", "output_tokens", "llm_call_count", "tool_calls", "delegations")
    counts = {f"total_{name}": 1 for name in names}
    task = {"task_description": "d", "raw": "x"}
    output = {"raw": "x", "exit_reason": "completed", "task_outputs": [task], "metrics": counts, "total_duration": 1}
    assert difference(output, {**output, "total_duration": 2}) == []
    other = {**output, "raw": "y", "metrics": {**counts, "total_llm_call_count": 2}}
    assert [each.split()[0] for each in difference(output, other)] == ["raw", "total_llm_call_count"]


def test_a_seed_gives_the_same_moments() -> None:
    """A case that failed can be repeated alone; nobody suffers more than one run may bear."""
    import random

    victims = [VICTIMS["agent"], VICTIMS["hub"]]
    chosen = [moments(SCENARIOS["dag"], victims, 9, random.Random("7")) for _ in range(2)]  # noqa: S311  repeatable
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 9
    assert sum(each.victim.name == "agent" for each in chosen[0]) <= 2
