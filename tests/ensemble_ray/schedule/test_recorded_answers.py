"""Answers of user code as the record has them."""

from __future__ import annotations

import json

import pytest

from ensemble_ray import RecordError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import StimulusRecorded
from ensemble_ray.schedule.instructions import EdgeMatches, PullItems, Question, ReflectOn, ResetMemory, UntilHolds
from ensemble_ray.schedule.stimuli import Completed, Evaluated, Stimulus, decode_stimulus, encode_stimulus
from ensemble_ray.values.ids import RUN

QUESTIONS: tuple[Question, ...] = (
    UntilHolds(unit="phase:draft#1/loop:refine", iteration=3),
    EdgeMatches(unit="graph:triage", step=4, edge=0),
    ResetMemory(unit="loop:refine", iteration=2),
    ReflectOn(unit="phase:draft", execution=2),
)


def recorded(stimulus: Stimulus, name: str = RUN) -> Stimulus | None:
    """Return what is read of what was written."""
    data = json.loads(json.dumps(encode_stimulus(stimulus).to_data()))
    return decode_stimulus(Fact(run="r", name=name, at=stimulus.at, data=StimulusRecorded.from_data(data, 0.0)))


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("answer", [True, False])
def test_verdict_is_read_as_it_was_written(question: Question, *, answer: bool) -> None:
    """S-LOOP-143, S-LOOP-54."""
    told = Evaluated(at=2.5, question=question, answer=answer)
    assert recorded(told) == told
    assert "message" not in encode_stimulus(told).to_data()


@pytest.mark.parametrize("question", QUESTIONS)
def test_error_of_user_code_is_read_as_it_was_written(question: Question) -> None:
    """S-LOOP-53: its class and its text."""
    told = Evaluated(at=2.5, question=question, answer=None, error_type="RuntimeError", message="boom")
    assert recorded(told) == told


def test_record_of_a_verdict() -> None:
    """S-LOOP-143: the form of the record, which stays."""
    told = Evaluated(at=2.5, question=QUESTIONS[0], answer=False)
    assert encode_stimulus(told).to_data() == {
        "type": "Evaluated",
        "at": 2.5,
        "answer": False,
        "question": "until",
        "unit": "phase:draft#1/loop:refine",
        "iteration": 3,
    }


def test_text_that_a_source_reads_is_recorded() -> None:
    """S-PHASE-70: of a review alone; other tasks have no such field."""
    told = Completed(at=1.0, instance="phase:p#0/review#0", text="RETRY: shorter")
    assert recorded(told, "phase:p#0/review#0") == told
    assert "text" not in encode_stimulus(Completed(at=1.0, instance="a#0")).to_data()


def test_answers_of_a_map_reduce_are_not_recorded() -> None:
    """S-MR-161: they follow from other facts."""
    with pytest.raises(KeyError):
        encode_stimulus(Evaluated(at=1.0, question=PullItems(count=1), answer=None))


@pytest.mark.parametrize("damage", [{"question": "other"}, {"question": None}, {"iteration": None}])
def test_damaged_answer_is_refused(damage: dict[str, object]) -> None:
    """S-DUR-30: what lacks a field, or asks what nobody asks."""
    data = {**encode_stimulus(Evaluated(at=1.0, question=QUESTIONS[0], answer=True)).to_data(), **damage}
    data = {name: value for name, value in data.items() if value is not None}
    told = StimulusRecorded.from_data(data, 0.0)
    with pytest.raises(TypeError):
        decode_stimulus(Fact(run="r", name=RUN, at=1.0, data=told))


@pytest.mark.parametrize("damage", [{"unit": 3}, {"answer": "yes"}, {"iteration": "2"}])
def test_answer_of_the_wrong_form_is_refused(damage: dict[str, object]) -> None:
    """S-DUR-30: as every fact."""
    data = {**encode_stimulus(Evaluated(at=1.0, question=QUESTIONS[0], answer=True)).to_data(), **damage}
    with pytest.raises((RecordError, ValueError, TypeError)):
        StimulusRecorded.from_data(data, 0.0)
