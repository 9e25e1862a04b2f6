"""Evaluations of a team on the inline runtime: durability, retries, judges, recorded runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from ensemble_ray import (
    Agent,
    Case,
    CaseProgress,
    Ensemble,
    EnsembleOutput,
    Evaluation,
    ExactMatch,
    Image,
    Judge,
    RunOptions,
    Score,
    Scorer,
    Task,
    ValidationError,
)
from ensemble_ray.evaluation.results import results_run_id
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.opening import store_at
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.media import PNG

from .teams import capital_of, make_cases, make_runtime, make_team


def make_evaluation(model: ScriptedModel, *scorers: object, cases: object = None, **fields: object) -> Evaluation:
    given = {"id": "capitals", "cases": cases or make_cases(), "scorers": list(scorers) or ["exact"], **fields}
    return Evaluation(make_team(model), **given)  # type: ignore[arg-type]


def test_every_repeat_is_a_tagged_run_when_an_evaluation_runs(home: str) -> None:
    """S-EVL-20, S-EVL-30."""
    model, seen = ScriptedModel(otherwise=capital_of), list[CaseProgress]()
    evaluation = make_evaluation(model, "exact", repeats=2, options=RunOptions(tags={"for": "tests"}))
    result = evaluation.run(runtime=make_runtime(home), on_progress=seen.append)
    assert [(case.id, [run.repeat for run in case.runs]) for case in result.cases] == [
        ("France", [1, 2]), ("Italy", [1, 2]), ("Spain", [1, 2]),
    ]  # fmt: skip
    assert result.summary("exact").mean == 1.0
    assert len(model.calls) == 6
    assert sorted(each.done for each in seen) == [1, 2, 3, 4, 5, 6]
    tagged = Evaluation.of_runs(["evaluation=capitals", "for=tests", "repeat=2"], "exact", cases=make_cases())
    assert len(tagged.run(runtime=make_runtime(home)).cases) == 3


def test_nothing_is_asked_again_when_the_same_evaluation_starts_again(home: str) -> None:
    """S-EVL-21, S-EVL-34: of judges neither, and the result is equal."""
    model = ScriptedModel(otherwise=capital_of)
    evaluation = make_evaluation(model, "exact", Judge("One word?"), repeats=2)
    first = evaluation.run(runtime=make_runtime(home))
    asked = len(model.calls)
    seen = list[CaseProgress]()
    again = evaluation.run(runtime=make_runtime(home), on_progress=seen.append)
    assert (again, len(model.calls)) == (first, asked)
    assert all(each.is_recorded for each in seen)
    assert Evaluation.load("capitals", runtime=make_runtime(home)) == first


def test_a_judge_scores_in_a_run_of_its_own_when_it_has_a_rubric(home: str) -> None:
    """S-EVL-18, S-EVL-20, S-EVL-21: another rubric asks the judge again, and not the team."""
    model, judge = ScriptedModel(otherwise=capital_of), ScriptedModel(otherwise=capital_of)
    evaluation = make_evaluation(model, Judge("One word?", llm=judge), Judge("Polite?", name="manner"), concurrency=1)
    result = evaluation.run(runtime=make_runtime(home))
    score = result.cases[0].runs[0].scores["judge"]
    assert (score.value, score.reason) == (0.75, "short and right")
    text = judge.calls[0].text
    assert all(part in text for part in ("One word?", '"country"', "Paris"))
    assert (len(judge.calls), len(model.calls)) == (3, 6)
    evaluation.replace(scorers=[Judge("Two words?", llm=judge)]).run(runtime=make_runtime(home))
    assert (len(judge.calls), len(model.calls)) == (6, 6)
    with pytest.raises(ValidationError, match="The scorer 'judge' has no model"):
        Evaluation.of_runs("evaluation=capitals", Judge("Right?")).run(runtime=make_runtime(home))


async def test_a_judge_scores_alone_when_it_is_awaited(home: str) -> None:
    """S-EVL-18."""
    judge = Judge("Right?", llm=ScriptedModel(otherwise=capital_of))
    assert await judge.score(EnsembleOutput.of("Paris", [], 0.0, 0), Case("c")) == Score(0.75, "short and right")


def test_a_failed_run_is_an_error_of_its_case_when_others_complete(home: str) -> None:
    """S-EVL-24, S-EVL-23: it is run again only if that is asked for, and the last attempt counts."""
    model = ScriptedModel(otherwise=capital_of)
    cases = [*make_cases(), Case("Atlantis", {"country": "Atlantis"}, expected="none")]
    evaluation = make_evaluation(model, cases=cases)
    result = evaluation.run(runtime=make_runtime(home))
    ((case, run, text),) = result.errors()
    assert (case, run.state, result.summary("exact").cases) == ("Atlantis", "failed", 3)
    assert "no such country" in text
    asked = len(model.calls)
    assert evaluation.run(runtime=make_runtime(home)) == result
    assert len(model.calls) == asked
    knowing = ScriptedModel(otherwise="none")
    again = evaluation.replace(team=make_team(knowing), retry_failed=True).run(runtime=make_runtime(home))
    assert (len(knowing.calls), again.summary("exact").mean, list(again.errors())) == (1, 1.0, [])
    assert evaluation.run(runtime=make_runtime(home)) == again
    of_runs = Evaluation.of_runs("evaluation=capitals", "exact", cases=cases)
    assert of_runs.run(runtime=make_runtime(home)).usage().errors == 0


def test_an_evaluation_goes_on_when_its_progress_callback_raises(home: str) -> None:
    """S-EVL-19."""

    def raises(progress: CaseProgress) -> None:
        raise ValueError(progress.case)

    evaluation = make_evaluation(ScriptedModel(otherwise=capital_of))
    assert evaluation.run(runtime=make_runtime(home), on_progress=raises).summary("exact").mean == 1.0


def test_a_picture_is_an_input_when_a_case_has_one(home: str) -> None:
    """S-EVL-2, S-EVL-21: and its run is not repeated."""
    model = ScriptedModel(otherwise="a cat", reads=["image"])
    agent = Agent("Viewer", "View", llm=model)
    team = Ensemble(tasks=[Task("Describe {photo}", agent=agent)])
    evaluation = Evaluation(team, [Case("cat", {"photo": Image(PNG)}, expected="a cat")], "exact", id="photos")
    result = evaluation.run(runtime=make_runtime(home))
    assert evaluation.run(runtime=make_runtime(home)) == result
    assert (result.summary("exact").mean, len(model.calls)) == (1.0, 1)


class _FailingScorer(Scorer):
    kind = "failing"

    async def score(self, output: EnsembleOutput, case: Case) -> Score:
        raise KeyError(f"{output.raw} {case.id}")


def test_a_scorer_that_raises_is_an_error_when_others_score(home: str) -> None:
    """S-EVL-19."""

    def leaves(output: EnsembleOutput, case: Case) -> bool:
        raise SystemExit(f"{output.raw} {case.id}")

    result = make_evaluation(ScriptedModel(otherwise=capital_of), _FailingScorer(), leaves, "exact").run(
        runtime=make_runtime(home)
    )
    scores = result.cases[0].runs[0].scores
    assert (scores["failing"].value, scores["failing"].error) == (None, "KeyError: 'Paris France'")
    assert scores["leaves"].error == "SystemExit: Paris France"
    assert (scores["exact"].value, result.summary("failing").errors) == (1.0, 3)


def test_the_evaluation_is_refused_when_its_team_changed(home: str) -> None:
    """S-EVL-22: before a model is called; another model is another team."""
    model, other = ScriptedModel(otherwise=capital_of), ScriptedModel(otherwise=capital_of)
    evaluation = make_evaluation(model)
    evaluation.run(runtime=make_runtime(home))
    changed = evaluation.replace(team=make_team(other, "Name the main town of {country}"))
    with pytest.raises(ValidationError, match=r"began with another team.*main town.*choose another id"):
        changed.run(runtime=make_runtime(home))
    assert other.calls == ()


def _make_synthesized(model: ScriptedModel, question: str) -> Ensemble:
    return Ensemble(tasks=[Task(question)], llm=model)


def test_a_team_with_made_agents_continues_when_it_is_the_same(home: str) -> None:
    """S-EVL-22."""
    model = ScriptedModel(otherwise=capital_of)
    evaluation = make_evaluation(model).replace(team=_make_synthesized(model, "Name the capital of {country}"))
    result = evaluation.run(runtime=make_runtime(home))
    asked = len(model.calls)
    assert evaluation.run(runtime=make_runtime(home)) == result
    assert len(model.calls) == asked
    with pytest.raises(ValidationError, match="began with another team"):
        evaluation.replace(team=_make_synthesized(model, "Where is {country}?")).run(runtime=make_runtime(home))


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        ([Case("a", {"land": "x"}, expected="y")], "inputs are missing: \\[country\\]"),
        ([Case("a", {"country": "x"})], "case 1: the scorer 'exact' needs 'expected'"),
        ([{"id": "a"}, {"id": "a"}], "occurs twice"),
    ],
)
def test_cases_are_refused_when_they_do_not_fit(home: str, cases: Sequence[object], message: str) -> None:
    """S-EVL-3: before a model is called."""
    model = ScriptedModel(otherwise=capital_of)
    with pytest.raises(ValidationError, match=message):
        make_evaluation(model, cases=cases).run(runtime=make_runtime(home))
    assert model.calls == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repeats": 0}, "Evaluation repeats must be > 0"),
        ({"concurrency": 0}, "Evaluation concurrency must be > 0"),
        ({"scorers": []}, "Evaluation needs at least one scorer"),
        ({"scorers": ["exact", ExactMatch()]}, "Two scorers are named 'exact'"),
        ({"team": 3}, "Evaluation team must be an Ensemble, got: int"),
        ({"team": None}, "Evaluation needs a team, or recorded runs"),
        ({"cases": None}, "Evaluation cases must not be None"),
        ({"id": "a/b"}, "Run id 'a/b' cannot name a record"),
        ({"id": "x" * 101}, "Evaluation id must have at most 100 characters"),
    ],
)
def test_an_evaluation_is_refused_when_a_field_is_wrong(fields: dict[str, object], message: str) -> None:
    """S-EVL-1, S-EVL-10."""
    team = make_team(ScriptedModel())
    with pytest.raises(ValidationError, match=message):
        Evaluation(**{"team": team, "cases": make_cases(), "scorers": ["exact"], **fields})  # type: ignore[arg-type]


def test_a_team_is_refused_when_it_records_nothing(home: str) -> None:
    """S-EVL-22."""
    evaluation = make_evaluation(ScriptedModel())
    team = make_team(ScriptedModel()).replace(durability="off")
    with pytest.raises(ValidationError, match="durability is 'off'"):
        evaluation.replace(team=team).run(runtime=make_runtime(home))


def test_an_evaluation_is_refused_when_scipy_is_missing(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-EVL-4."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValidationError, match=r'pip install "ensemble-ray\[eval\]"'):
        make_evaluation(ScriptedModel()).run(runtime=make_runtime(home))


async def test_ended_runs_stay_when_an_evaluation_is_cancelled(home: str) -> None:
    """S-EVL-25, S-EVL-21: the next start resumes the others, and asks for nothing twice."""
    is_reached, asked = threading.Event(), list[str]()

    async def answer(call: ScriptedCall) -> object:
        asked.append(call.text)
        if "Spain" in call.text and not is_reached.is_set():
            is_reached.set()
            await asyncio.Event().wait()
        return capital_of(call)

    evaluation = make_evaluation(ScriptedModel(otherwise=answer), concurrency=1)
    running = asyncio.create_task(evaluation.arun(runtime=make_runtime(home)))
    await asyncio.to_thread(is_reached.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    result = await evaluation.arun(runtime=make_runtime(home))
    assert result.summary("exact").mean == 1.0
    assert [sum(land in text for text in asked) for land in ("France", "Italy", "Spain")] == [1, 1, 2]


def test_at_most_so_many_cases_run_when_there_is_a_limit(home: str) -> None:
    """S-EVL-20."""
    running, most = set[str](), list[int]()

    async def answer(call: ScriptedCall) -> object:
        running.add(call.text)
        await asyncio.sleep(0)
        most.append(len(running))
        running.discard(call.text)
        return capital_of(call)

    make_evaluation(ScriptedModel(otherwise=answer), repeats=5, concurrency=2).run(runtime=make_runtime(home))
    assert max(most) <= 2


def test_recorded_runs_are_scored_when_no_team_runs(home: str) -> None:
    """S-EVL-26: by ids, by equal inputs, or without expected outputs."""
    model = ScriptedModel(otherwise=capital_of)
    runtime, team = make_runtime(home), make_team(model)
    ids = [str(team.run({"country": land}, runtime=runtime, tags={"day": "1"}).run_id) for land in ("France", "Spain")]
    by_inputs = Evaluation.of_runs(ids, "exact", cases=make_cases(wrong=["Spain"])).run(runtime=runtime)
    assert [(case.id, case.score("exact")) for case in by_inputs.cases] == [("France", 1.0), ("Spain", 0.0)]

    def short(output: EnsembleOutput, case: Case) -> bool:
        return len(output.raw) < 6 and case.expected is None

    by_tag = Evaluation.of_runs("day=1", short).run(runtime=runtime)
    assert [(case.id, case.inputs, case.score("short")) for case in by_tag.cases] == [
        (ids[0], {"country": "France"}, 1.0), (ids[1], {"country": "Spain"}, 0.0),
    ]  # fmt: skip
    assert len(model.calls) == 2
    with pytest.raises(ValidationError, match="is of no case"):
        Evaluation.of_runs(ids, "exact", cases=make_cases()[:1]).run(runtime=runtime)
    with pytest.raises(ValidationError, match=r"No ended run matches \[day=2\]"):
        Evaluation.of_runs("day=2", "exact").run(runtime=runtime)


def test_the_result_is_made_again_when_its_record_was_deleted(home: str) -> None:
    """S-EVL-34: a later result replaces an earlier one."""
    evaluation, runtime = make_evaluation(ScriptedModel(otherwise=capital_of)), make_runtime(home)
    first = evaluation.run(runtime=runtime)
    evaluation.replace(scorers=["exact", "contains"]).run(runtime=runtime)
    assert Evaluation.load("capitals", runtime=runtime).scorers == ("exact", "contains")
    store = store_at(runtime.store_address)
    run_blocking(store.delete(results_run_id("capitals")))
    with pytest.raises(ValidationError, match="There is no result of an evaluation 'capitals'"):
        Evaluation.load("capitals", runtime=runtime)
    assert evaluation.run(runtime=runtime) == first


def test_a_typed_output_reaches_a_function_when_its_task_has_a_type(home: str) -> None:
    """S-EVL-17, S-EVL-21: also when it is read from the record."""
    model = ScriptedModel(otherwise="3")
    agent = Agent("Counter", "Count", llm=model)
    team = Ensemble(tasks=[Task("Count the letters of {word}", agent=agent, output_type=int)])

    def right(output: EnsembleOutput, case: Case) -> bool:
        return output.task_outputs[-1].parsed == case.expected

    evaluation = Evaluation(team, [Case("c", {"word": "abc"}, expected=3)], [right, "numeric"], id="count")
    for _ in range(2):
        result = evaluation.run(runtime=make_runtime(home))
        assert (result.summary("right").mean, result.summary("numeric").mean) == (1.0, 1.0)
    assert len(model.calls) == 1
