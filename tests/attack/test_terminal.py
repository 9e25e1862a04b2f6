"""What models, endpoints, tools and files say is text on the terminal, and never a command to it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tty
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ensemble_ray import ToolCall, UnknownEffect
from ensemble_ray.execute.tools.unknown import ask_unknown
from ensemble_ray.testing import Fault, ModelServer, ServedRequest
from ensemble_ray.testing.model_server import Answer
from tests.attack.hostile_text import HOSTILE, Shown, command, intruders, terminal
from tests.command_line import COMMAND, environment_of
from tests.processes import own_directory
from tests.template import run_forked

ROOT = Path(__file__).resolve().parents[2]
#: Generous: Ray starts on two cores while other things run.
PATIENCE_S = 300.0


def _quoted(text: str) -> str:
    """As a text in YAML's double quotes, which take no character that is not printable."""
    return (
        '"'
        + "".join(each if each.isprintable() and each not in '"\\' else f"\\U{ord(each):08x}" for each in text)
        + '"'
    )


_QUOTED = _quoted(HOSTILE)
#: A name that a file system takes, and the key of a task of that name.
_FILE, _KEY = HOSTILE.replace("/", "|"), HOSTILE.replace("/", "_")

TOOLS = f'''
import logging, os, warnings
from ensemble_ray import ExitEarlyError, tool

HOSTILE = {HOSTILE!r}

@tool
def echo(text: str) -> str:
    """Say it."""
    warnings.warn(HOSTILE)
    logging.getLogger("ensemble_ray.somewhere").warning("A warning: %s", HOSTILE)
    return text

@tool(effect="once")
def broken(text: str) -> str:
    """Fail."""
    raise OSError(HOSTILE)

def handler(context):
    raise OSError(HOSTILE)

def shout(context):
    if "bad" in context.description:
        raise OSError(HOSTILE)
    return HOSTILE
'''
TEAM = f"""
llm: {{model: m, base_url: "URL"}}
workflow: WORKFLOW
inputs: {{given: {_QUOTED}}}
agents:
  writer: {{role: {_QUOTED}, goal: {_QUOTED}, background: {_QUOTED}, tools: ["hostile_tools:echo", "hostile_tools:broken"]}}
tasks:
  first: {{description: {_quoted("Say {given}, {topic} " + HOSTILE)}, expected_output: {_QUOTED}, agent: writer}}
  {_QUOTED}: {{description: {_QUOTED}, expected_output: {_QUOTED}, agent: writer, context: [first]}}
"""
FAILING = f"""
tasks:
  first: {{description: {_QUOTED}, handler: "hostile_tools:handler"}}
"""
REFUSED = f"""
llm: {{model: {_QUOTED}, base_url: "URL"}}
retry: {{max_attempts: 1, max_wait: 0.1}}
tasks:
  first: {{description: {_quoted("Refuse " + HOSTILE)}, expected_output: {_QUOTED}}}
"""
WRONG = f"""
{_QUOTED}: 1
tasks:
  {_QUOTED}: {{{_QUOTED}: 1, agent: {_QUOTED}}}
"""
MAP = f"""
map_reduce:
  items: items.jsonl
  map: {{description: {_quoted("Shout {text} " + HOSTILE)}, handler: "hostile_tools:shout"}}
  reduce: {{description: {_QUOTED}, handler: "hostile_tools:shout"}}
  chunk_size: 2
  on_item_error: collect
"""


def _script(request: ServedRequest) -> Answer:
    """Calls tools with hostile arguments and names, then answers; or refuses with a hostile body."""
    if "Refuse" in request.text:
        return Fault(status=400, message=HOSTILE)
    results = sum(message.get("role") == "tool" for message in request.messages)
    if request.tools and not results:
        given = json.dumps({"text": HOSTILE})
        return [ToolCall(f"call-{number}", name, given) for number, name in enumerate(("echo", "broken", HOSTILE))]
    return HOSTILE


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of teams and items with hostile texts and names, and a hostile endpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("ENSEMBLE_RAY_RUNTIME", "inline")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-test")
    (tmp_path / "hostile_tools.py").write_text(TOOLS, encoding="utf-8")
    items = [{"text": HOSTILE}, {"text": "bad"}, {HOSTILE: 1}]
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, items)) + f"\n{HOSTILE}\n", encoding="utf-8")
    (tmp_path / f"{_FILE}.md").write_text(HOSTILE, encoding="utf-8")
    with ModelServer(_script) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        for workflow in ("parallel", "hierarchical"):
            text = TEAM.replace("URL", server.base_url).replace("WORKFLOW", workflow)
            (tmp_path / f"{workflow}-{_FILE}.yaml").write_text(text, encoding="utf-8")
        (tmp_path / "refused.yaml").write_text(REFUSED.replace("URL", server.base_url), encoding="utf-8")
        for name, text in (("failing", FAILING), ("wrong", WRONG), ("map", MAP)):
            (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
        yield tmp_path
    sys.modules.pop("hostile_tools", None)


def _commands() -> list[tuple[str, ...]]:
    """Every command, each with hostile arguments or over hostile records, in an order in which they can be called."""
    team, led = f"parallel-{_FILE}.yaml", f"hierarchical-{_FILE}.yaml"
    topic = ("-i", f"topic={HOSTILE}")
    mapped = ("map", "items.jsonl", "--prompt", "Say {text} " + HOSTILE, "--output", f"{_FILE}.jsonl")
    return [
        ("plan", team, *topic),
        ("plan", led),
        ("plan", "map.yaml"),
        ("plan", "wrong.yaml"),
        ("plan", HOSTILE),
        ("run", team, *topic, "--run-id", "one"),
        ("run", team, "-i", f"{HOSTILE}=1"),
        ("run", team, "-i", HOSTILE),
        ("run", team, *topic, "--run-id", HOSTILE),
        ("run", team, *topic, "--run-id", "told", "--trace", f"no/such/{_FILE}"),
        ("run", led, *topic, "--run-id", "led"),
        ("run", "failing.yaml", "--run-id", "failed"),
        ("--debug", "run", "failing.yaml"),
        ("run", "refused.yaml"),
        ("run", team, "--llm", HOSTILE),
        ("run", team, "--runtime", HOSTILE),
        ("run", "hostile_tools:" + HOSTILE),
        (*mapped, "--dry-run"),
        (*mapped, "--dry-run", "--json"),
        (*mapped, "--run-id", "mapped", "--dead-letters", f"dead-{_FILE}.jsonl"),
        (*mapped, "--run-id", "again"),
        ("map", f"{_FILE}.csv", "--prompt", "x", "--output", "o.jsonl"),
        ("run", "map.yaml", "--run-id", "reduced"),
        ("demo", f"{_FILE}.md", "--llm", "openai:" + HOSTILE, "--runtime", "inline", "--run-id", "read"),
        ("demo", f"no-{_FILE}.md"),
        ("runs",),
        ("runs", "--state", HOSTILE),
        ("trace",),
        ("trace", "one"),
        ("trace", "one", "--task", HOSTILE),
        ("trace", "one", "--task", _KEY),
        ("trace", "failed"),
        ("trace", "reduced"),
        ("trace", HOSTILE),
        ("trace", "one", "--json"),
        ("trace", "reduced", "--json"),
        ("plan", team, "--json"),
        ("runs", "--json"),
        ("resume", "one"),
        ("resume", "one", "--json"),
        ("resume", HOSTILE),
        ("fork", "one", "--from", _KEY, "--dry-run"),
        ("fork", "one", "--from", "nothing" + HOSTILE),
        ("fork", "one", "--from", _KEY, "--run-id", "forked"),
        ("cancel", HOSTILE),
        ("delete", HOSTILE),
        ("prune", "--older-than", HOSTILE),
        ("prune", "--older-than", "0h", "--dry-run"),
        ("doctor", "--no-ray", "--llm", "openai:" + HOSTILE),
        ("models", "list"),
        ("models", HOSTILE),
        (HOSTILE,),
        ("--" + HOSTILE,),
    ]


#: Commands whose output names nothing of what was planted.
_SILENT = {("models", "list")}


def test_nothing_that_was_planted_steers_the_terminal(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-60, S-SEC-61, S-SEC-62: all commands, with hostile texts in all that they read, at a real terminal."""
    shown = [command(monkeypatch, *arguments) for arguments in _commands()]
    steered = {each.arguments: found for each in shown if (found := intruders(each.text))}
    assert steered == {}
    assert [each.arguments for each in shown if "PLANTED" not in each.text and each.arguments not in _SILENT] == []


async def test_a_question_at_the_terminal_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-65: names and arguments of what is asked about come from a model."""
    asked = UnknownEffect(
        run_id="one", task=HOSTILE, agent_role=HOSTILE, tool_name=HOSTILE, arguments=HOSTILE, effect="t#0/0/call-0",
        idempotency_key="key", begun_at=datetime.now(UTC),
    )  # fmt: skip
    with terminal(Shown(()), monkeypatch, typed="d\n") as shown:
        assert await ask_unknown(asked) == "done"
    assert intruders(shown.text) == set()
    assert "PLANTED" in shown.text


#: A team whose module and tools write wherever they can; its texts are hostile.
NOISY = f'''
import logging, os, subprocess, sys, threading, warnings
from ensemble_ray import Agent, Ensemble, MapEnsemble, Task, tool

HOSTILE = {HOSTILE!r}
DATA = HOSTILE + "\\ud83d"

def make_noise():
    os.write(1, b"noise of a descriptor\\n")
    print("noise of a module")
    sys.__stdout__.write("noise of a stream\\n")
    subprocess.run([sys.executable, "-c", "print('noise of a program')"])

def warn():
    warnings.warn(HOSTILE)
    logging.getLogger("elsewhere").error("Wrong: %s", HOSTILE)
    failing = threading.Thread(target=int, args=(HOSTILE,))
    failing.start()
    failing.join()

@tool
def noise(text: str) -> str:
    """Make noise."""
    make_noise()
    return text

agent = Agent(role="Worker", goal="work", llm="openai:m", tools=[noise])
team = Ensemble(tasks=[Task(name="first", description="Say it", expected_output="a", agent=agent)])
mapped = MapEnsemble(items=["a"], map_task=lambda item, _: Task.of("Map " + item), map_agent=lambda _: agent)

def noisy():
    make_noise()
    return team

def noisy_map():
    make_noise()
    return mapped

def warning():
    warn()
    return team
'''


@pytest.fixture
def noisy() -> Iterator[Path]:
    """A directory with that team, with a short path, since Ray puts sockets there."""
    with own_directory() as directory:
        (directory / "noisy_team.py").write_text(NOISY, encoding="utf-8")
        yield directory


def _call(place: Path, environment: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return run_forked([*COMMAND, *arguments], env=environment, cwd=place, capture_output=True, timeout=PATIENCE_S)


def _noise(request: ServedRequest) -> Answer:
    """Uses the tool once, then answers."""
    if any(message.get("role") == "tool" for message in request.messages):
        return HOSTILE
    return ToolCall("call-0", "noise", '{"text": "x"}')


def test_standard_output_is_the_json_alone(noisy: Path) -> None:
    """S-SEC-63: whatever a module, a tool, or a program that it starts writes to it goes to standard error."""
    with ModelServer(_noise) as server:
        environment = environment_of(noisy, server)
        given: dict[str, object] = {}
        for arguments in (
            ("run", "noisy_team:noisy", "--run-id", "one"),
            ("plan", "noisy_team:noisy"),
            ("resume", "one"),
            ("run", "noisy_team:noisy_map", "--run-id", "mapped"),
        ):
            ended = _call(noisy, environment, *arguments, "--json")
            assert ended.returncode == 0, ended.stderr
            given[" ".join(arguments[:2])] = json.loads(ended.stdout)
            for source in ("descriptor", "module", "stream", "program"):
                assert f"noise of a {source}".encode() in ended.stderr
            assert intruders(ended.stdout.decode()) == set()
    found = given["run noisy_team:noisy"]
    assert isinstance(found, dict)
    assert found["raw"] == HOSTILE, "the data is what the model said"


def test_standard_output_is_the_json_alone_on_ray(noisy: Path) -> None:
    """S-SEC-63: whatever Ray and its workers write."""
    with ModelServer(_noise) as server:
        environment = environment_of(noisy, server)
        ended = _call(noisy, environment, "run", "noisy_team:noisy", "--runtime", "ray", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["raw"] == HOSTILE


def test_an_answer_is_data_in_a_pipe_and_text_on_a_terminal(noisy: Path) -> None:
    """S-SEC-61, S-SEC-64: as the model gave it; at a terminal answer, warnings, log lines and errors of threads are text."""
    with ModelServer(HOSTILE) as server:
        environment = {**environment_of(noisy, server), "TERM": "xterm-256color", "COLUMNS": "4000"}
        environment.pop("CI", None)
        ended = _call(noisy, environment, "run", "noisy_team:warning", "--run-id", "one")
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.decode() == f"{HOSTILE}\n"
        assert intruders(ended.stderr.decode()) == set()
        controller, end = pty.openpty()
        tty.setraw(end)
        with subprocess.Popen(  # noqa: S603  our own command
            [*COMMAND, "resume", "one"], env=environment, cwd=noisy, stdin=end, stdout=end, stderr=end
        ) as process:
            os.close(end)
            shown = Shown(())
            while chunk := _read(controller):
                shown.chunks.append(chunk)
            os.close(controller)
        assert process.returncode == 0, shown.text
    assert intruders(shown.text) == set()
    for part in ("UserWarning: PLANTED", "Wrong: PLANTED", "Exception in thread", "1 of 1 tasks"):
        assert part in shown.text


def _read(controller: int) -> bytes:
    """What comes next; nothing when the other end is closed."""
    try:
        return os.read(controller, 65_536)
    except OSError:
        return b""
