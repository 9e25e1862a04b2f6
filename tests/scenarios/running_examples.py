"""Examples run as a user runs them: a process of its own, an endpoint named by the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from ensemble_ray.testing import ModelServer, ServedRequest
from ensemble_ray.testing.model_server import Answer
from tests.template import run_forked

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

Script = Callable[[ServedRequest], Answer]


def results_of(request: ServedRequest) -> list[str]:
    """What tools have told the model so far."""
    return [str(message["content"]) for message in request.messages if message.get("role") == "tool"]


def run_example(name: str, script: Script, home: Path, *arguments: str) -> tuple[str, ModelServer]:
    """Run an example; gives what it printed and the server it talked to."""
    with ModelServer(script) as server:
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": server.base_url,
            "OPENAI_API_KEY": "sk-of-a-test",
            "ENSEMBLE_RAY_RUNTIME": "inline",
            "ENSEMBLE_RAY_HOME": str(home),
        }
        command = [sys.executable, str(EXAMPLES / name), *arguments]
        ended = run_forked(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, server
