"""Endpoints to measure, the server of their models, and clients. In: which one. Out: where it answers, and its process."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.children import Child, clean_environment, start_child
from benchmarks.endpoint.client import Answers, Load

__all__ = ["PLACES", "Clients", "Place", "Surroundings", "endpoint", "surroundings"]

_SCRIPTS = Path(__file__).parent.parent / "scripts"
#: Name of the team, as a model.
_TEAM = "answering"
_TEAM_FILE = """\
agents:
  writer:
    goal: Answer the question as well as you can
    llm: {{model: benchmark, base_url: "{url}", api_key_env: BENCHMARK_KEY}}
tasks:
  answer:
    agent: writer
    description: "{{question}}"
    expected_output: An answer
    stream: true
"""
#: What is measured: written by hand, the endpoint over the inline runtime, on Ray, and there with two replicas.
PLACES = ("bare", "inline", "ray", "ray-2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An endpoint that answers."""

    name: str
    url: str
    child: Child

    def load(self, kind: str, *, requests: int, clients: int = 1, rate: float = 0.0) -> Load:
        """Return a load for it; `kind` as in `Load`."""
        given = {"kind": kind, "requests": requests, "clients": clients, "rate": rate}
        return Load(url=self.url, model=_TEAM, **given)  # type: ignore[arg-type]  # a kind of load


class Clients:
    """A process of clients."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def send(self, load: Load) -> Answers:
        """Send a load and return what came back."""
        return Answers(**json.loads(self._child.ask(json.dumps(asdict(load)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is around the endpoints of a measurement: the server of their models, and their clients."""

    model_url: str
    clients: Clients
    home: Path
    environment: dict[str, str]


@contextlib.contextmanager
def surroundings(*, latency_ms: int = 0) -> Generator[Surroundings]:
    """Start the model server and the clients, and end both.

    Args:
        latency_ms: What the model takes for an answer.
    """
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ensemble-ray-bench-")))
        environment = clean_environment(home) | {"BENCHMARK_KEY": "benchmark"}
        command = ["-m", "ensemble_ray.testing.model_server", "--until-stdin-closes", "--text", "A short answer."]
        model = stack.enter_context(start_child([*command, "--latency-ms", str(latency_ms)], environment))
        clients = stack.enter_context(start_child(["-m", "benchmarks.endpoint.client"], environment))
        clients.line()
        yield Surroundings(model_url=model.line(), clients=Clients(clients), home=home, environment=environment)


@contextlib.contextmanager
def endpoint(name: str, around: Surroundings) -> Generator[Place]:
    """Start one, and end it.

    Args:
        name: One of `PLACES`.
        around: Its models and clients.
    """
    team = around.home / f"{_TEAM}.yaml"
    team.write_text(_TEAM_FILE.format(url=around.model_url))
    script, *arguments = {
        "bare": ["endpoint_bare.py", around.model_url],
        "inline": ["endpoint_inline.py", str(team)],
        "ray": ["endpoint_on_ray.py", str(team), "1"],
        "ray-2": ["endpoint_on_ray.py", str(team), "2"],
    }[name]
    with start_child([str(_SCRIPTS / script), *arguments], around.environment) as child:
        yield Place(name=name, url=child.line(), child=child)
