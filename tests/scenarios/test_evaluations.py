"""Evaluations from end to end: the command and its exit codes, a killed process, Ray, PostgreSQL."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ensemble_ray import Ensemble, Evaluation, InlineRuntime, Judge, RayRuntime, Task, TaskHandlerContext, provide
from ensemble_ray.testing import ModelServer, ScriptedModel, ServedRequest
from tests.command_line import COMMAND, PATIENCE_S, call_command, environment_of
from tests.ensemble_ray.evaluation.teams import capital_of, make_cases, make_runtime, make_team
from tests.postgres_server import PostgresServer
from tests.processes import own_directory, program

TEAM = """
llm: openai:some-model
tasks:
  capital: {description: "Name the capital of {country}"}
evaluation:
  cases: cases.jsonl
  repeats: 2
  concurrency: 1
  scorers: [exact, {judge: {rubric: "Is it right?"}}]
  minimum: {exact: 0.5}
"""
_CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Barcelona"}


def answer(request: ServedRequest) -> str:
    """Answer the team, one country wrongly, or a judge."""
    if "Judge an output" in request.text:
        return '{"reason": "fine", "score": 0.75}'
    return next(city for land, city in _CAPITALS.items() if land in request.text)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a team file and cases."""
    with own_directory() as directory:
        expected = {**_CAPITALS, "Spain": "Madrid"}
        rows = [
            json.dumps({"id": land, "inputs": {"country": land}, "expected": city, "tags": [land[0]]})
            for land, city in expected.items()
        ]
        (directory / "cases.jsonl").write_text("\n".join(rows), encoding="utf-8")
        (directory / "team.yaml").write_text(TEAM, encoding="utf-8")
        yield directory


def test_the_exit_code_tells_what_happened_when_an_evaluation_ends(place: Path) -> None:
    """S-EVL-41, S-EVL-42, S-EVL-43."""
    with ModelServer(answer) as server:
        environment = environment_of(place, server)

        def evaluate(*arguments: str) -> tuple[int, str, str]:
            called = call_command(place, environment, "eval", *arguments)
            return called.returncode, called.stdout, called.stderr

        code, printed, said = evaluate("team.yaml", "--id", "one", "--junit", "out/report.xml", "--tag", "for=ci")
        assert (code, said.count("from the record")) == (0, 0), said
        assert "exact        3      0.667" in printed
        assert "[6/6] Spain #2: exact 0.00, judge 0.75" in said
        assert 'name="exact &gt;= 0.5"' in (place / "out" / "report.xml").read_text(encoding="utf-8")
        asked = len(server.requests)
        code, printed, _ = evaluate("team.yaml", "--id", "one", "--json", "--min", "exact=0.9", "--min", "judge=0.7")
        data = json.loads(printed)
        assert (code, data["failures"], len(server.requests)) == (
            5, ["exact: the mean is 0.667, and must be at least 0.9"], asked,
        )  # fmt: skip
        assert data["tags"]["S"]["scores"]["exact"]["interval"]["mean"] == 0.0
        code, printed, _ = evaluate(
            "--runs", "evaluation=one", "cases.jsonl", "-s", "contains", "--compare", "one", "-q"
        )
        assert code == 2  # no scorer in common
        code, printed, _ = evaluate(
            "team.yaml", "-s", "exact", "--only", "F", "--repeats", "1", "--compare", "one", "-q"
        )
        assert code == 0
        assert "compared with one, by a paired permutation test" in printed
        asked = len(server.requests)
        for wrong in (
            ("team.yaml", "--min", "other=1"),
            ("team.yaml", "--min", "exact"),
            ("team.yaml", "--compare", "nowhere"),
            ("team.yaml", "--junit", "team.yaml/report.xml"),
            ("team.yaml", "--only", "X"),
            ("team.yaml", "-s", "exakt"),
            ("team.yaml", "missing.jsonl"),
            ("team.yaml", "cases.jsonl", "--runs", "x=y"),
            (),
        ):
            assert evaluate(*wrong)[0] == 2, wrong
        assert evaluate("team.yaml", "--id", "one", "--llm", "openai:other")[0] == 2
        assert len(server.requests) == asked


def test_the_exit_code_is_3_when_a_run_fails(place: Path) -> None:
    """S-EVL-43, S-EVL-24, S-EVL-23: the command shows the error; a retry runs the failed case alone."""
    with ModelServer(lambda request: "" if "Spain" in request.text else answer(request)) as server:
        team = TEAM.replace('{description: "Name', '{max_output_retries: 0, output_type: str, description: "Name')
        (place / "team.yaml").write_text(team, encoding="utf-8")
        environment = environment_of(place, server)
        failing = ("eval", "team.yaml", "--id", "two", "-s", "exact", "--repeats", "1", "--min", "exact=1")
        called = call_command(place, environment, *failing)
        assert called.returncode == 3, called.stderr
        assert "Error: case 'Spain', run" in called.stderr
    with ModelServer(lambda _: "Madrid") as server:
        environment = environment_of(place, server)
        called = call_command(place, environment, *failing, "--retry-failed", "--quiet")
        assert (called.returncode, len(server.requests)) == (0, 1), called.stderr


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_an_evaluation_continues_when_its_process_died(place: Path, sign: signal.Signals) -> None:
    """S-EVL-21, S-EVL-25, S-EVL-43: no answered call is repeated, of judges neither."""
    is_open = threading.Event()
    reached = threading.Event()

    def slow(request: ServedRequest) -> str:
        if "Italy" in request.text and "Judge" not in request.text and not is_open.is_set():
            reached.set()
            is_open.wait(PATIENCE_S)
        return answer(request)

    with ModelServer(slow) as server:
        environment = environment_of(place, server)
        command = [*COMMAND, "eval", "team.yaml", "--id", "three"]
        with program(command, log=place / "log", env=environment, cwd=place) as running:
            assert reached.wait(PATIENCE_S)
            os.kill(running.process.pid, sign)
            code = running.process.wait(timeout=PATIENCE_S)
        is_open.set()
        if sign == signal.SIGINT:
            assert code == 130, running.text
            assert "Interrupted: 2 of 6 runs scored. Continue: the same command with --id three" in running.text
        called = call_command(place, environment, "eval", "team.yaml", "--id", "three")
        assert called.returncode == 0, called.stderr
        assert called.stderr.count("from the record") == 2
        asked = [request.text for request in server.requests]
    judged = [text for text in asked if "Judge an output" in text]
    of_team = [text for text in asked if "Judge an output" not in text]
    assert len(judged) == 6
    assert [sum(land in text for text in of_team) for land in _CAPITALS] == [2, 3, 2]


def test_the_result_is_equal_when_an_evaluation_runs_on_ray(ray_runtime: RayRuntime, home: str) -> None:
    """S-EVL-18, S-EVL-20, S-EVL-34: the team on Ray, judges in this process, and the same scores."""
    model = ScriptedModel(otherwise=capital_of)
    evaluation = Evaluation(
        make_team(model), make_cases(wrong=["Spain"]), ["exact", Judge("Right?")], id="four", repeats=2
    )
    result = evaluation.run(runtime=ray_runtime)
    asked = len(model.calls)
    assert evaluation.run(runtime=ray_runtime) == result
    assert (len(model.calls), asked) == (12, 12)
    here = evaluation.run(runtime=make_runtime(f"{home}/other"))
    assert [case.score("exact") for case in result.cases] == [case.score("exact") for case in here.cases] == [1, 1, 0]
    assert result.summary("judge") == here.summary("judge")


def open_capitals() -> dict[str, str]:
    """Deps that each worker process opens."""
    return {**_CAPITALS}


def name_capital(context: TaskHandlerContext[dict[str, str]]) -> str:
    """A handler that reads the deps."""
    return f"{context.deps[context.inputs['country']]} for {context.user}"


def test_runs_on_ray_have_the_deps_when_their_evaluation_has_them(ray_runtime: RayRuntime) -> None:
    """S-EVL-28, S-CTX-23: deps that cannot travel are an error of each run, and the next start runs them."""
    team = Ensemble(tasks=[Task("Name the capital of {country}", handler=name_capital)], deps_type=dict)
    evaluation = Evaluation(team, make_cases(), "contains", id="six")
    refused = evaluation.run(runtime=ray_runtime, deps={"lock": threading.Lock()}, user="ada")
    errors = [text for _, _, text in refused.errors()]
    assert len(errors) == 3
    assert all("cannot travel to a worker process" in each for each in errors)
    result = evaluation.run(runtime=ray_runtime, deps=provide(open_capitals), user="ada")
    assert [case.runs[0].output for case in result.cases] == [f"{city} for ada" for city in _CAPITALS.values()]


def test_an_evaluation_is_stored_when_records_are_in_postgresql(postgres: PostgresServer) -> None:
    """S-EVL-34, S-EVL-26."""
    runtime, model = InlineRuntime(store=postgres.new_database()), ScriptedModel(otherwise=capital_of)
    with runtime:
        evaluation = Evaluation(make_team(model), make_cases(), ["exact", Judge("Right?")], id="five")
        result = evaluation.run(runtime=runtime)
        assert evaluation.run(runtime=runtime) == result
        assert Evaluation.load("five", runtime=runtime) == result
        assert len(model.calls) == 6
        again = evaluation.replace(scorers=["contains"]).run(runtime=runtime)
        assert Evaluation.load("five", runtime=runtime) == again
        scored = Evaluation.of_runs("evaluation=five", "exact", cases=make_cases()).run(runtime=runtime)
        assert scored.summary("exact").mean == 1.0
