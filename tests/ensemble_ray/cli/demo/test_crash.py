"""What `demo --crash` reads out of a record, and the team that a resumption makes again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import MapReduceEnsemble, OpenAIResponsesModel
from ensemble_ray.cli.demo import Comparison, demo_team
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.record.identity.definition import map_reduce_run_data
from ensemble_ray.teamfile import Runnable, load_source


def answer(name: str, seq: int, latency_s: float = 1.0) -> Fact[ModelAnswered]:
    """A recorded answer of the model."""
    told = ModelAnswered.from_data({"latency_s": latency_s}, float(seq))
    return Fact(run="r", name=f"{name}#0/0/model", at=float(seq), data=told, seq=seq)


def data_of(team: Runnable) -> PlanRecorded:
    """What a resumption compares."""
    assert isinstance(team, MapReduceEnsemble)
    return map_reduce_run_data(team, workflow=team.shown_workflow, inputs={}, items=team.item_source.identity)


BEFORE = [answer("map-1", 3), answer("map-2", 4, 2.0)]


def test_the_table_tells_what_was_asked_when() -> None:
    """S-DUR-37: a line for each call; how many could be on their way; none was asked again."""
    after = [*BEFORE, answer("map-3", 9), answer("final-reduce", 12, 0.25)]
    compared = Comparison(before=BEFORE, after=after, slots=4)
    assert compared.is_kept
    assert [" ".join(line.split()) for line in compared.table().splitlines()] == [
        "model call before the kill after it",
        "map-1 1.0 s -",
        "map-2 2.0 s -",
        "map-3 - 1.0 s",
        "final-reduce - 0.2 s",
        "answered 2 2",
        "on their way in the kill, so asked twice at most 1",
        "asked again though answered 0",
    ]


@pytest.mark.parametrize(
    "after",
    [
        pytest.param([*BEFORE, answer("map-1", 9)], id="a second answer"),
        pytest.param(BEFORE[:1], id="an answer is gone"),
        pytest.param([BEFORE[0], answer("map-2", 4, 3.0)], id="another answer in its place"),
    ],
)
def test_a_broken_promise_is_seen_in_the_record(after: list[Fact]) -> None:
    """S-DUR-37: what was recorded stands as it stood, once."""
    assert not Comparison(before=BEFORE, after=after, slots=4).is_kept


@pytest.mark.parametrize("llm", ["openai:m", "openai-responses:m"])
def test_the_demo_is_made_again_from_what_its_run_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llm: str
) -> None:
    """S-DUR-35, S-DUR-36, S-RSP-1: the same texts, model and options, also from another directory."""
    (tmp_path / "a.md").write_text("The sea rises and falls.\n\nThe moon pulls it.", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    demo = demo_team([Path("a.md")], chunks=2, llm=llm, threads=1)
    assert isinstance(demo.reader, OpenAIResponsesModel) == (llm != "openai:m")
    made = demo.team
    monkeypatch.chdir("/")
    again = load_source(made.source)
    assert data_of(again) == data_of(made)
    assert again.source == made.source
