"""Receivers of OpenTelemetry that are away, refuse or are named wrongly; and what is sent when a process ends or a command asks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ensemble_ray import Ensemble, OpenTelemetryListener, TaskExecutionError
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, task
from tests.command_line import calling
from tests.otlp_receiver import Receiver, closed_port, receiving_by_environment
from tests.scenarios.teams import PATIENCE_S
from tests.template import run_forked

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver that the environment names."""
    with receiving_by_environment(monkeypatch) as found:
        yield found


def test_receiver_that_is_away_costs_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-INT-34: for spans and for figures, without what is secret in its URL; runs go on as they do."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    with closed_port() as closed, caplog.at_level(logging.WARNING):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://user:s3cret@{closed}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://{closed}/?key=abcdef")
        listener = OpenTelemetryListener()
        team = Ensemble(tasks=[task("write", agent(ScriptedModel(otherwise="text")))], listeners=[listener])
        for _ in range(2):
            assert team.run(runtime="inline").raw == "text"
            assert listener.flush(PATIENCE_S)
        assert listener.close(PATIENCE_S)
    told = [each.getMessage() for each in caplog.records]
    assert [each.partition(" cannot be sent")[0] for each in told] == ["Spans", "Metrics"]
    assert not any(secret in each for secret in ("s3cret", "abcdef") for each in told)


def test_receiver_that_refuses_costs_one_line_in_the_log_until_it_takes_spans(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """S-INT-34: what failed is told with the run's class of error."""
    receiver.status = 400
    listener = OpenTelemetryListener()

    def fail(asked: ScriptedCall) -> str:
        raise TimeoutError("slow")

    good = Ensemble(tasks=[task("write", agent(ScriptedModel(otherwise="text")))], listeners=[listener])
    bad = Ensemble(tasks=[task("write", agent(ScriptedModel(otherwise=fail)))], listeners=[listener], retry=None)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert good.run(runtime="inline").raw == "text"
            assert listener.flush()
    told = [each.getMessage() for each in caplog.records if "cannot be sent" in each.getMessage()]
    assert [each.partition(" ")[0] for each in told] == ["Spans", "Metrics"]
    assert [each for each in caplog.records if each.name.startswith("opentelemetry")] == []
    receiver.status = 200
    with pytest.raises(TaskExecutionError):
        bad.run(runtime="inline")
    assert listener.flush()
    failed, run = receiver.one("invoke_agent Writer"), receiver.one("invoke_workflow")
    assert (failed.is_error, failed.attributes["error.type"]) == (True, "AgentExecutionError")
    assert (run.is_error, run.attributes["error.type"]) == (True, "TaskExecutionError")
    assert "slow" not in str(receiver.spans), "what an error says may be content"
    assert listener.close()


def test_what_was_not_sent_is_sent_when_the_process_ends(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-INT-30, S-INT-34: of a program that ends with its run, and waits for nothing."""
    monkeypatch.setenv("ENSEMBLE_RAY_OTEL", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "600000")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
    ended = run_forked(
        [sys.executable, "-c", "from tests.scenarios.short_run import main; main()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert [each.name for each in receiver.spans] == ["invoke_agent Writer", "chat", "invoke_workflow"]
    assert {each.service for each in receiver.spans} == {"shop"}
    assert "gen_ai.client.operation.duration" in receiver.metrics


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("collector:4318", 2, "--otlp must begin with http:// or https://"),
        ("{refusing}", 1, "The receiver of spans at {refusing} cannot be reached or refuses them: "),
        ("http://user:s3cret@{closed}/?key=abc", 1, "The receiver of spans at http://{closed}/?... cannot be reached"),
        ("env", 1, "The receiver of spans at http://{closed}/own?... cannot be reached"),
    ],
)
def test_command_says_why_nothing_was_sent(
    receiver: Receiver,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    url: str,
    code: int,
    said: str,
) -> None:
    """S-INT-39: what to do stands in the message, and nothing of the URL that may be secret."""
    receiver.status = 400
    Ensemble(tasks=[task("write", agent(ScriptedModel("text")))]).run(runtime="inline", run_id="plain")
    with closed_port() as closed:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://user:s3cret@{closed}/own?key=abc")
        named = {"refusing": receiver.url, "closed": closed}
        done = calling(capsys)("trace", "plain", "--otlp", url.format_map(named))
    assert done.code == code
    assert said.format_map(named) in done.said
    assert "What to do: " in done.said or code == 2
    assert not any(each in done.said for each in ("s3cret", "abc", ".. What"))


def test_path_of_a_receiver_stands_before_its_query(receiver: Receiver, capsys: pytest.CaptureFixture[str]) -> None:
    """S-INT-39: also where the URL has the path already."""
    Ensemble(tasks=[task("write", agent(ScriptedModel("text")))]).run(runtime="inline", run_id="plain")
    for path in ("", "/", "/v1/traces", "/v1/traces/"):
        done = calling(capsys)("trace", "plain", "--otlp", f"{receiver.url}{path}?key=abc")
        assert done.code == 0, done.said
        assert "abc" not in done.said
    assert len(receiver.spans) == 12


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("latest", "--content"), "add --otlp URL"),
        (("latest", "--otlp", "env", "--json"), "leave --json, --task"),
        (("latest", "--otlp", "env", "--task", "write"), "leave --json, --task"),
        (("latest", "--otlp", "env", "--svg", "run.svg"), "leave --json, --task"),
        (("--otlp", "env"), "ensemble-ray trace latest --otlp URL"),
    ],
)
def test_options_that_sending_leaves_undone_are_refused(
    capsys: pytest.CaptureFixture[str], given: tuple[str, ...], said: str
) -> None:
    """S-INT-39: before anything is looked for."""
    done = calling(capsys)("trace", *given)
    assert (done.code, said in done.said) == (2, True), done.said
