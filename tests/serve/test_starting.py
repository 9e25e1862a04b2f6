"""`ensemble-ray serve`: what it refuses before it starts anything; what it serves is seen in `test_app`."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from ensemble_ray.cli.app import invoke
from ensemble_ray.serve import app as starting
from ensemble_ray.serve.__main__ import main
from tests.command_line import run_command, work_in
from tests.processes import own_environment
from tests.serve.teams import KEY, KEY_VARIABLE, write_team

Refusal = Callable[..., str]


@pytest.fixture
def refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Generator[Refusal, None, None]:
    """What it says when it refuses, called in this process; it comes to no start of Ray."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("it starts Ray")

    def refuse(*arguments: str, **variables: str) -> str:
        became: list[list[str]] = []
        with monkeypatch.context() as patch:
            patch.setattr(os, "execv", lambda _, command: became.append(command))
            assert invoke(["serve", *arguments]) == 0
        ((_, *module, options),) = became
        assert module == ["-m", "ensemble_ray.serve"]
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert main(options) == 2
        return capsys.readouterr().err

    monkeypatch.setattr(starting, "join_or_start", started)
    for name in (KEY_VARIABLE, "OPENAI_API_KEY", "OPENAI_BASE_URL", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for _ in work_in(tmp_path, monkeypatch):
        yield refuse


def test_a_wrong_team_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    """S-SRV-61: by the program itself."""
    done = run_command(tmp_path, own_environment(tmp_path), "serve", "taem.yaml")
    assert done.returncode == 2, done.stderr
    assert "There is no file 'taem.yaml'" in done.stderr
    assert not list(tmp_path.glob("ray*"))


def test_a_missing_key_a_taken_port_and_unknown_names_are_refused(tmp_path: Path, refusal: Refusal) -> None:
    """S-SRV-61, S-SRV-207, S-SRV-211, S-SRV-213: before anything is started; and tools, models and namespaces that are none."""
    write_team(tmp_path, "http://127.0.0.1:9/v1")
    assert KEY_VARIABLE in refusal("team.yaml")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        key = {KEY_VARIABLE: KEY}
        assert "There is no module 'office'" in refusal("team.yaml", "--tool", "office:look_up", **key)
        assert "Model 'large': " in refusal("team.yaml", "--model", "large=nonsense", **key)
        assert "write NAME=MODEL" in refusal("team.yaml", "--model", "=openai:a", **key)
        assert "A namespace has up to 64" in refusal("team.yaml", "--namespace", "a b", **key)
        assert f"127.0.0.1:{port}" in refusal("team.yaml", "--port", port, **key)


def test_models_without_their_keys_are_refused(tmp_path: Path, refusal: Refusal) -> None:
    """S-SRV-217: of the team, of its `models`, and of the operator; on a cluster the keys are elsewhere."""
    agent = "  writer: {role: Writer, goal: g, llm: 'openai:gpt-of-the-agent'}"
    tasks = "  write: {description: Write, agent: writer}"
    models = "models: {fast: 'openai:gpt-fast'}"
    (tmp_path / "team.yaml").write_text(f"agents:\n{agent}\ntasks:\n{tasks}\n{models}\n", encoding="utf-8")
    (tmp_path / "other.yaml").write_text(
        "llm: 'openai:gpt-other'\ntasks: {write: {description: Write}}\n", encoding="utf-8"
    )
    said = refusal("team.yaml", "other.yaml")
    assert "Team 'team': Agent 'Writer': OpenAIChatModel('gpt-of-the-agent'): no API key" in said
    assert "Team 'team': fast: OpenAIChatModel('gpt-fast'): no API key" in said
    assert "Team 'other': llm: OpenAIChatModel('gpt-other'): no API key" in said
    write_team(tmp_path, "http://127.0.0.1:9/v1")
    assert "large: OpenAIChatModel('a'): no API key" in refusal(
        "team.yaml", "--model", "large=openai:a", **{KEY_VARIABLE: KEY}
    )


def test_options_of_versions_and_of_a_drain_reach_the_process_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-VER-7, S-VER-40: a time below 0 is refused."""
    started: list[dict[str, object]] = []
    monkeypatch.setattr(os, "execv", lambda _, words: started.append(json.loads(words[-1])))
    assert invoke(["serve", "a.yaml", "--watch", "--drain-s", "30"]) == 0
    assert invoke(["serve", "a.yaml"]) == 0
    assert invoke(["serve", "a.yaml", "--drain-s", "-1"]) == 2
    assert [(each["watch"], each["drain_s"]) for each in started] == [(True, 30.0), (False, 0.0)]
    assert starting.EndpointOptions.model_validate({"watch": True}).watch


def test_reviews_at_a_console_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """S-SRV-218: a served run has no console."""
    monkeypatch.setattr(starting, "serve_until_interrupted", lambda *_, **__: None)
    path = tmp_path / "letters.yaml"
    text = "llm: local\nreview_handler: console\ntasks:\n  draft: {description: Write, review: required}\n"
    options = json.dumps({"ensembles": [str(path)], "host": "127.0.0.1", "port": 0, "name": "x"})
    path.write_text(text, encoding="utf-8")
    assert main(options) == 0
    assert "Team 'letters': its reviews are asked at the console" in capsys.readouterr().err
    path.write_text(f"{text}review_wait: detach\n", encoding="utf-8")
    assert main(options) == 0
    assert "console" not in capsys.readouterr().err
