"""The command line as a user meets it: processes, an endpoint, signals, pipes; once on a Ray of its own."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from ensemble_ray import ToolCall
from ensemble_ray.testing import Fault, ModelServer, ServedRequest
from ensemble_ray.testing.model_server import Answer
from tests.command_line import COMMAND, PATIENCE_S, ROOT, call_command, environment_of, run_command
from tests.processes import own_directory, program
from tests.template import run_forked

TEAMS = ROOT / "examples" / "teams"

Servers = Callable[..., ModelServer]

TEAM = '''
import time
from ensemble_ray import Agent, Ensemble, Task, tool

@tool(timeout=0.2)
def sleepy(text: str) -> str:
    """Never comes back."""
    time.sleep(3600)
    return text

writer = Agent(role="Writer", goal="Write", tools=[sleepy], llm="openai:m")
article = Task(name="article", description="Write on {topic}", expected_output="Prose", agent=writer)
team = Ensemble(tasks=[article], retry=None)
'''


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for one test, with a short path: records, modules, Ray's files."""
    with own_directory() as directory:
        (directory / "my_team.py").write_text(TEAM, encoding="utf-8")
        yield directory


def _article(request: ServedRequest) -> Answer:
    """The example's conversation: the writer counts words once, then writes."""
    results = [str(message["content"]) for message in request.messages if message.get("role") == "tool"]
    if "word_count" in request.tools and not results:
        return ToolCall("call_1", "word_count", '{"text": "one two three"}')
    return f"An article of {results[0]} words" if results else "Facts"


@pytest.mark.parametrize("runtime", ["inline", "ray"])
def test_a_team_file_runs_with_code_beside_it(place: Path, model_server: Servers, runtime: str) -> None:
    """The example from another directory, on both runtimes: tools and guardrails are found also in worker processes."""
    server = model_server(_article)
    environment = environment_of(place, server)
    command = ["run", str(TEAMS / "article.yaml"), "--input", "topic=tides", "--runtime", runtime, "--run-id", "one"]
    ended = run_command(place, environment, *command)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "An article of 3 words\n"
    assert "done     3/3  article (Writer)" in ended.stderr
    trace = call_command(place, environment, "trace", "one")
    assert trace.stdout.startswith("Run one: parallel, completed")
    assert 'word_count({"text": "one two three"}) -> 3' in trace.stdout
    assert len(server.requests) == 4


def test_a_module_runs_from_the_current_directory(place: Path, model_server: Servers) -> None:
    """`module:attribute`, an ensemble or a function that makes one."""
    server = model_server("An answer.")
    environment = environment_of(place, server)
    for target, runs in (("article_team:team", run_command), ("article_team:make_team", call_command)):
        ended = runs(TEAMS, environment, "run", target, "-i", "topic=tides", "-q")
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count("An answer.") == 3
    assert "(deterministic) <- answer-1" in call_command(TEAMS, environment, "plan", "article_team:team").stdout


@pytest.mark.parametrize(
    ("script", "expected", "runs"),
    [
        (Fault(status=401, message="Incorrect API key provided."), "refused the key (HTTP 401)", run_command),
        (Fault(status=404, message="no such model"), "does not know the model or the path (HTTP 404)", call_command),
        (Fault(kind="garbage"), "sent an answer that cannot be used", call_command),
        (Fault(kind="drop"), "Cannot reach endpoint", call_command),
    ],
)
def test_one_clear_message_is_left_when_the_endpoint_fails(
    place: Path, model_server: Servers, script: Fault, expected: str, runs: Callable[..., CompletedProcess[str]]
) -> None:
    """S-ERR-46: task, endpoint, reason, what to do, once; exit code 1, no traceback; `--debug` shows it; no key anywhere."""
    environment = environment_of(place, model_server(script))
    ended = runs(place, environment, "run", "my_team:team", "-i", "topic=tides")
    assert ended.returncode == 1
    assert ended.stdout == ""
    error = ended.stderr[ended.stderr.index("Error:") :]
    assert error.startswith("Error: task 'article' (agent 'Writer') failed:\n")
    told = [line for line in ended.stderr.splitlines() if ": attempt " not in line]  # retries are lines of their own
    assert sum(expected in line for line in told) == error.count(expected) == 1
    assert "Traceback" not in ended.stderr
    shown = runs(place, environment, "--debug", "run", "my_team:team", "-i", "topic=tides")
    assert "Traceback" in shown.stderr
    assert "Error: task" not in shown.stderr
    assert "sk-of-a-test" not in ended.stderr + shown.stderr


def test_one_clear_message_is_left_when_nothing_listens(place: Path) -> None:
    """An address where no server is."""
    environment = environment_of(place, OPENAI_BASE_URL="http://127.0.0.1:9/v1")
    ended = call_command(place, environment, "run", "my_team:team", "-i", "topic=tides", "-q")
    assert ended.returncode == 1
    assert "Cannot reach endpoint http://127.0.0.1:9/v1" in ended.stderr
    assert "ensemble-ray doctor" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_model_is_told_when_its_tool_arguments_are_garbage_or_a_tool_never_returns(
    place: Path, model_server: Servers
) -> None:
    """Both are the model's to mend; the process ends although the tool did not (S-SET-34, S-SET-48)."""

    def script(request: ServedRequest) -> Answer:
        results = [str(message["content"]) for message in request.messages if message.get("role") == "tool"]
        calls = ('{"text": ', '{"text": "x"}')
        if len(results) < len(calls):
            return ToolCall(f"call_{len(results)}", "sleepy", calls[len(results)])
        return f"First: {results[0].splitlines()[0]} Then: {results[1]}"

    ended = run_command(
        place, environment_of(place, model_server(script)), "run", "my_team:team", "-i", "topic=tides", "-q"
    )
    assert ended.returncode == 0, ended.stderr
    assert "Then: Tool error: timed out after 0.2 s" in ended.stdout


@pytest.mark.parametrize("runtime", ["inline", "ray"])
def test_the_run_ends_within_seconds_when_it_is_interrupted(place: Path, model_server: Servers, runtime: str) -> None:
    """Ctrl-C: the call in flight is dropped, everything that was started is gone, exit code 130 (S-SET-27)."""
    server = model_server("never", latency_s=3600)
    environment = environment_of(place, server)
    command = [*COMMAND, "run", "my_team:team", "-i", "topic=x", "--runtime", runtime, "--run-id", "stopped"]
    with program(command, log=place / "log", env=environment, cwd=place, is_forked=False) as running:
        running.until(lambda: server.in_flight, "the model call", timeout_s=PATIENCE_S)
        os.killpg(running.process.pid, signal.SIGINT)  # as a terminal does: the whole group gets it
        assert running.process.wait(timeout=PATIENCE_S) == 130, running.text
        server.wait_served(1, timeout_s=PATIENCE_S)
        assert "Ending the run" in running.text
        assert "The run ended early: cancelled" in running.text
        assert "Traceback" not in running.text
    assert server.abandoned == 1
    assert "cancelled" in call_command(place, environment, "trace", "stopped").stdout


def test_nothing_is_said_when_the_reader_of_a_pipe_has_seen_enough(place: Path, model_server: Servers) -> None:
    """`ensemble-ray ... | head`."""
    environment = environment_of(place, model_server("x" * 1_000_000))
    line = f"{' '.join(COMMAND)} run my_team:team -i topic=x -q | head -c 5"
    ended = subprocess.run(  # noqa: S602  a pipe is the point
        line,
        shell=True,
        env=dict(environment),
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (ended.stdout, ended.stderr) == ("xxxxx", "")


@pytest.mark.parametrize(
    ("closed", "arguments", "runs"),
    [
        ("stdout", ["trace", "one"], subprocess.run),
        ("stdout", ["trace", "one", "--json"], run_forked),
        ("stdout", ["runs"], run_forked),
        ("stdout", ["resume", "one", "--json"], run_forked),
        ("stderr", ["resume", "one"], subprocess.run),
    ],
)
def test_a_command_ends_quietly_when_nobody_reads_its_pipe(
    place: Path, model_server: Servers, closed: str, arguments: list[str], runs: Callable[..., CompletedProcess[bytes]]
) -> None:
    """S-SEC-66: `ensemble-ray trace RUN | head -1`: exit code 0, no traceback; also where the interpreter itself ends."""
    environment = environment_of(place, model_server("x"))
    recorded = call_command(place, environment, "run", "my_team:team", "-i", "topic=x", "--run-id", "one", "-q")
    assert recorded.returncode == 0, recorded.stderr
    reader, writer = os.pipe()
    os.close(reader)  # before anything is written
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, closed: writer}
    ended = runs([*COMMAND, *arguments], env=dict(environment), cwd=place, check=False, timeout=PATIENCE_S, **given)
    os.close(writer)
    assert ended.returncode == 0
    assert b"Traceback" not in (ended.stdout or b"") + (ended.stderr or b"")
    assert b"Broken" not in (ended.stdout or b"") + (ended.stderr or b"")


def test_a_command_runs_when_its_streams_are_closed(place: Path, model_server: Servers) -> None:
    """S-SEC-66: `ensemble-ray run TEAM >&- 2>&-` of a script: the run is made, and the exit code is its own."""
    environment = environment_of(place, model_server("x"))
    for streams in (">&-", "2>&-", ">&- 2>&-"):
        line = f"{' '.join(COMMAND)} run my_team:team -i topic=x --json {streams}"
        ended = subprocess.run(  # noqa: S602  a shell closes them
            line, shell=True, env=dict(environment), cwd=place, capture_output=True, check=False, timeout=PATIENCE_S
        )
        assert (ended.returncode, b"Traceback" in ended.stderr) == (0, False), ended.stderr


def test_every_failure_has_its_way_out_when_the_doctor_looks(place: Path, model_server: Servers) -> None:
    """A key that is refused, a model that is not there."""
    server = model_server("yes", api_key="sk-right", models=["there"])
    environment = environment_of(place, server, OPENAI_API_KEY="sk-right")
    fine = call_command(place, environment, "doctor", "--no-ray", "--llm", "openai:there")
    assert fine.returncode == 0, fine.stdout
    assert "answers and takes the key" in fine.stdout
    assert "openai:there answered in" in fine.stdout
    wrong = call_command(place, environment, "doctor", "--no-ray", "--llm", "openai:not-there")
    assert wrong.returncode == 1
    assert "does not know the model or the path" in wrong.stdout
    refused = call_command(
        place, {**environment, "OPENAI_API_KEY": "sk-wrong"}, "doctor", "--no-ray", "--llm", "openai:there", "--json"
    )
    assert refused.returncode == 1
    findings = {finding["name"]: finding for finding in json.loads(refused.stdout)}
    assert findings["Model"]["state"] == "failed"
    assert "set OPENAI_API_KEY" in findings["Model"]["detail"]


@pytest.mark.extended
def test_a_small_run_is_made_on_ray_when_the_doctor_looks(place: Path) -> None:
    """It leaves no record behind.

    S-SEC-31, S-SEC-35, S-SEC-40: the first local instance of a user leaves a token that nobody else can read.
    """
    environment = environment_of(place, OPENAI_API_KEY="")
    with program([*COMMAND, "doctor"], log=place / "log", env=environment, cwd=place) as running:
        assert running.process.wait(timeout=PATIENCE_S * 2) == 0, running.text
        assert "ok    Ray             a local instance ran a task" in running.text
        assert "ok    Ray's token     none yet" in running.text
    made = place / ".ray" / "auth_token"
    assert [stat.S_IMODE(each.stat().st_mode) for each in (made, made.parent)] == [0o600, 0o700]
    assert len(bytes.fromhex(made.read_text(encoding="utf-8"))) == 32
    assert call_command(place, environment_of(place), "trace").stdout == ""
