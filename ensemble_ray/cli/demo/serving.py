"""`ensemble-ray demo --serve`: an endpoint is started, asked, reviewed and stopped; what happens is said as it goes.

The endpoint is the program that everybody has, in a session and with a home of its own, and is asked as any client asks it: with the
`openai` package, and over HTTP with a key. Never: a process that is left when this ends, also by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from ensemble_ray.cli.demo.sessions import kill_session, our_program
from ensemble_ray.cli.view.terminal import FAILED, FINE, own_command, say, say_piece
from ensemble_ray.errors import EnsembleError

#: How long the endpoint may take to answer, and to end, s: two cores of a busy machine start some ten processes.
_START_S, _STOP_S = 300.0, 90.0
_PAUSE_S = 0.1
#: How long an answer may take, s.
_ANSWER_S = 300.0
#: Of the endpoint's words, what is shown where it fails.
_LAST_LINES = 20
_QUESTION, _OTHER_QUESTION = "What is the moon?", "Why is the sea salty?"
_TEAMS: Mapping[str, Mapping[str, object]] = {
    "answer": {
        "stream": True,
        "tasks": {
            "answer": {"description": "Answer in one sentence: {question}", "expected_output": "One short sentence"}
        },
    },
    "letter": {
        "review_wait": "detach",
        "tasks": {
            "draft": {
                "description": "Write one sentence that thanks {name} for help",
                "expected_output": "One sentence",
                "review": {"prompt": "Is the draft good?", "timeout": 0},
            },
            "letter": {
                "description": "Write to {name} in two sentences, from the draft, without a heading",
                "expected_output": "A short letter",
                "context": ["draft"],
            },
        },
    },
}


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """An endpoint that answers, and a key of it."""

    url: str
    key: str

    def ask(self, method: str, path: str, body: object = None) -> Any:  # JSON
        """Return the answer to a request."""
        with self.open(method, path, body) as answer:
            return json.load(answer)

    def open(self, method: str, path: str, body: object = None) -> Any:  # the library does not say what it returns
        """Return an answer to read from."""
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        return urlopen(Request(self.url + path, data, headers, method=method), timeout=_ANSWER_S)  # noqa: S310  its own address

    def events(self, run_id: str) -> Iterator[str]:
        """Return what happens in a run, to its end."""
        with self.open("GET", f"/runs/{run_id}/events") as answer:
            for line in answer:
                name, _, value = line.decode().strip().partition(": ")
                if name == "event":
                    yield value


def serve_and_ask(llm: str) -> int:
    """Start an endpoint, ask it with the openai client, decide a review over HTTP, and stop it; gives the exit code.

    Args:
        llm: Model of its teams.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # asked to end, it stops what it started, as by Ctrl-C
    with tempfile.TemporaryDirectory(prefix="ensemble-ray-demo-") as place:
        folder = Path(place)
        model = {"model": llm.removeprefix("openai:"), "max_tokens": 48, "temperature": 0}
        files = [folder / f"{name}.yaml" for name in _TEAMS]
        for file, team in zip(files, _TEAMS.values(), strict=True):
            # JSON is YAML
            file.write_text(json.dumps({"llm": model, **team}), encoding="utf-8")
        try:
            with _serving(folder, files) as endpoint:
                _ask_as_openai(endpoint)
                _decide_a_review(endpoint)
        except (OSError, EnsembleError) as error:
            say(f"The demonstration failed: {error}")
            return FAILED
        say("Stopped. Nothing of it is left.")
        return FINE


def _ask_as_openai(endpoint: _Endpoint) -> None:
    from openai import OpenAI, OpenAIError  # the help does not need it

    said: Any = [{"role": "user", "content": _QUESTION}]
    try:
        with OpenAI(base_url=f"{endpoint.url}/v1", api_key=endpoint.key, timeout=_ANSWER_S, max_retries=0) as client:
            say(f"\nclient.models.list(): {', '.join(sorted(each.id for each in client.models.list()))}")
            begun = time.monotonic()
            answer = client.chat.completions.create(model="answer", messages=said)
            say(
                f"\nclient.chat.completions.create(model='answer'), {_QUESTION!r}, in {time.monotonic() - begun:.1f} s:"
            )
            say(f"  {answer.choices[0].message.content}")
            say(f"  run {answer.id}, {answer.usage.total_tokens if answer.usage else '?'} tokens")
            _stream(client)
    except OpenAIError as error:
        raise EnsembleError(f"the endpoint answered the openai client: {error}") from error


def _stream(client: Any) -> None:  # a client of the package that is loaded late
    say(f"\nclient.chat.completions.create(model='answer', stream=True), {_OTHER_QUESTION!r}:")
    begun, first_s, pieces = time.monotonic(), None, 0
    said = [{"role": "user", "content": _OTHER_QUESTION}]
    say_piece("  ")
    for chunk in client.chat.completions.create(model="answer", messages=said, stream=True):
        if piece := chunk.choices[0].delta.content if chunk.choices else None:
            first_s = first_s or time.monotonic() - begun
            pieces += 1
            say_piece(piece)
    say(f"\n  {pieces} pieces, the first after {first_s or 0:.1f} s, the last after {time.monotonic() - begun:.1f} s")


def _decide_a_review(endpoint: _Endpoint) -> None:
    body = {"ensemble": "letter", "inputs": {"name": "Ada"}, "run_id": "letter-to-ada"}
    say(f"\nPOST /runs?wait=300 {json.dumps(body)}")
    run = endpoint.ask("POST", f"/runs?wait={_ANSWER_S:.0f}", body)
    say(f"  {run['status']}: it holds no process while it waits")
    say("\nGET /reviews")
    (review,) = endpoint.ask("GET", "/reviews")["reviews"]
    say(f"  {review['prompt']} {review['task_output']}")
    decision = {"decision": "edit", "text": "Thank you for your help with the machine, Ada.", "comment": "Warmer"}
    say(f"\nPOST /reviews/{review['run_id']}/{review['gate_id'][:8]}... {json.dumps(decision)}")
    decided = endpoint.ask("POST", f"/reviews/{review['run_id']}/{review['gate_id']}", decision)
    say(f"  {decided['decision']}: the run goes on by itself")
    say("\nGET /runs/letter-to-ada/events")
    for event in endpoint.events("letter-to-ada"):
        say(f"  {event}")
    found = endpoint.ask("GET", "/runs/letter-to-ada")
    if found["status"] != "completed":
        raise EnsembleError(f"the run ended as {found['status']}: {found['error']}")
    say(f"\nThe letter:\n  {found['result']['raw']}")


@contextlib.contextmanager
def _serving(folder: Path, files: list[Path]) -> Generator[_Endpoint]:
    """Start an endpoint of teams, and stop it.

    Raises:
        EnsembleError: it does not start.
    """
    left_out = ("ENSEMBLE_RAY_STORE", "RAY_ADDRESS")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    environment = {**kept, "ENSEMBLE_RAY_HOME": str(folder / "home"), "TERM": "dumb"}
    made = subprocess.run(  # noqa: S603  our own command
        [*our_program(), "keys", "add", "demo", "--teams", "*", "--rights", "run,read,review"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    key = made.stdout.strip()
    if made.returncode != FINE:
        raise EnsembleError(f"no key could be made: {made.stderr.strip()}")
    say(f"$ {own_command()} keys add demo --teams '*' --rights run,read,review\n  erk_...{key[-4:]}")
    arguments = ["serve", *map(str, files), "--port", "0"]
    say(f"\n$ {own_command()} serve {' '.join(file.name for file in files)} --port 0")
    log = folder / "log"
    begun = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603  our own command; Ctrl-C reaches this process only, which stops it in order
            [*our_program(), *arguments],
            env=environment,
            stdout=output,
            stderr=output,
            cwd=folder,
            start_new_session=True,
        )
    try:
        url = _address(process, log)
        say(f"  {url} answers after {time.monotonic() - begun:.1f} s")
        yield _Endpoint(url, key)
        say("\nStopping the endpoint.")
    except BaseException:
        say("\nStopping the endpoint.")
        raise
    finally:
        _stop(process)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return where an endpoint answers that is being started.

    Raises:
        EnsembleError: it ends, or does not come.
    """
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            _, found, rest = line.partition("] at http://")
            if found and line.endswith("(Ctrl-C stops)"):
                return f"http://{rest.split()[0]}"
        time.sleep(_PAUSE_S)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    raise EnsembleError("the endpoint did not start. Its last words:\n" + "\n".join(lines))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End an endpoint as Ctrl-C does; where it does not end, all of its session by force."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        kill_session(process)
