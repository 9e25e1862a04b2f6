"""What may be secret in an endpoint's URL (user, password, query, fragment) is in no output and in no record."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ensemble_ray.testing import Fault, ModelServer
from tests.attack.hostile_text import command

SECRET = "s3cret"  # noqa: S105  what is looked for
TEAM = """
llm: {model: m, base_url: "URL"}
retry: {max_attempts: 1, max_wait: 0.1}
agents: {writer: {goal: Write}}
tasks: {first: {description: Say it, agent: writer}}
"""
MAP = """
llm: {model: m, base_url: "URL"}
retry: {max_attempts: 1, max_wait: 0.1}
map_reduce:
  items: items.jsonl
  map: {description: "Say {text}"}
  reduce: {description: Join}
"""
LED = f"workflow: hierarchical\n{TEAM}"


def _secret_url(url: str) -> str:
    """The URL with something secret in each part that can hold it."""
    return url.replace("://", f"://{SECRET}-user:{SECRET}-password@") + f"?api_key={SECRET}-query#{SECRET}-fragment"


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("", ""),
        ("", "sk-of-a-test"),
        (f"http://{SECRET}:p@ss@127.0.0.1:9/v1?x=@{SECRET}", ""),
        (f"http://u:{SECRET}@localhost/v1", ""),
        (f"http://127.0.0.1:{SECRET}/v1", ""),
        (f"ftp://u:{SECRET}@127.0.0.1/?{SECRET}", ""),
    ],
)
def test_no_secret_of_a_url_is_shown_or_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, url: str, key: str
) -> None:
    """S-SEC-67: also where the endpoint refuses, nothing listens, or it is no URL at all."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("ENSEMBLE_RAY_RUNTIME", "inline")
    monkeypatch.setenv("OPENAI_API_KEY", key)
    (tmp_path / "items.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    with ModelServer(Fault(status=404, message="no")) as server:
        secret = url or _secret_url(server.base_url)
        for name, text in (("team", TEAM), ("map", MAP), ("led", LED)):
            (tmp_path / f"{name}.yaml").write_text(text.replace("URL", secret), encoding="utf-8")
        monkeypatch.setenv("OPENAI_BASE_URL", secret)
        shown = [
            command(monkeypatch, *arguments)
            for arguments in (
                ("plan", "team.yaml"),
                ("plan", "team.yaml", "--json"),
                ("plan", "map.yaml"),
                ("plan", "led.yaml", "--json"),
                ("run", "team.yaml", "--run-id", "one"),
                ("--debug", "run", "team.yaml"),
                ("run", "team.yaml", "--llm", "openai:m", "--run-id", "two"),
                ("run", "map.yaml", "--run-id", "three"),
                ("trace", "one"),
                ("trace", "one", "--json"),
                ("trace", "three", "--json"),
                ("resume", "three"),
                ("doctor", "--no-ray", "--llm", "openai:m"),
                ("doctor", "--no-ray", "--json"),
            )
        ]
    assert [each.arguments for each in shown if SECRET in each.text] == []
    assert [each.arguments for each in shown if each.arguments[0] == "plan" and each.code] == [] or url
    written = [path for path in Path(home).rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert written == []
