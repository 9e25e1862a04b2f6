"""The demonstrations of `ensemble-ray demo`.

The same options build the same team in any process, so that `resume` can rebuild it from the record.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.request import Request, urlopen

from msgspec import Struct

from ensemble_ray import WebDashboard
from ensemble_ray.cli.view.terminal import (
    FAILED,
    FINE,
    INTERRUPTED,
    count_noun,
    own_command,
    screen_line,
    show,
    write_note,
    write_part,
)
from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.task import Task
from ensemble_ray.ensemble import Ensemble
from ensemble_ray.errors import EnsembleError, ValidationError
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact
from ensemble_ray.map_reduce import MapReduceEnsemble
from ensemble_ray.teamfile.fields import GroupPrompt, ItemPrompt
from ensemble_ray.values.ids import new_run_id

if TYPE_CHECKING:
    from ensemble_ray.llm.openai import OpenAIChatModel
    from ensemble_ray.ports import ChatModel
    from ensemble_ray.values.outputs import EnsembleOutput


# Two of the editor's longest texts, so that each level halves the number of texts.
BUDGET_TOKENS = 160
# The number of a list's next item ends no sentence.
_SENTENCE_END = re.compile(r"(?<! \d)(?<! \d\d)[.!?][\"')\u201d\u2019]*(?= |$)|[\u3002\uff01\uff1f]")


def digest_team(
    passages: Sequence[Passage], *, reader_llm: ChatModel, editor_llm: ChatModel, max_parallel_tasks: int
) -> MapReduceEnsemble:
    """`passages` must not be empty."""
    reading = Task(
        # The editor's prompt repeats the first paragraph of a reader's prompt, so the passage comes after it (S-MR-118).
        description="Say in one or two short sentences what this text about '{label}' says.\n\n{text}",
        expected_output="One or two short sentences in plain words.",
        agent=Agent(role="Reader", goal="Say what a text is about, briefly and in plain words", llm=reader_llm),
    )
    joining = Task(
        description="Tell what these notes say.",
        expected_output="A text with one short sentence for each note.",
        agent=Agent(role="Editor", goal="Make short texts out of notes", llm=editor_llm),
    )
    return MapReduceEnsemble(
        items=[{"label": passage.label, "text": passage.text} for passage in passages],
        map_task=ItemPrompt(reading),
        reduce_task=GroupPrompt(joining),
        target_token_budget=BUDGET_TOKENS,
        max_parallel_tasks=max_parallel_tasks,
    )


def render_digest(passages: Sequence[Passage], output: EnsembleOutput) -> str:
    traces = output.trace.task_traces
    notes = [each.raw for each in output.task_outputs if each.trace is not None and each.trace.node_type == "map"]
    lines = ["Digest", "", whole_sentences(output.raw), "", "Notes", ""]
    lines += [f"- {passage.label}: {whole_sentences(note)}" for passage, note in zip(passages, notes, strict=False)]
    lines += ["", "Tree", ""]
    for level in output.trace.map_reduce_levels:
        done = [each for each in traces if each.map_reduce_level == level.level]
        tokens = f"{sum(each.metrics.input_tokens for each in done):,} + {sum(each.metrics.output_tokens for each in done):,}"
        count = count_noun(level.task_count, done[0].node_type or "task")
        lines.append(f"level {level.level}  {count:<14}  {tokens} tokens, {level.duration.total_seconds():.1f} s")
    return "\n".join(lines)


def whole_sentences(text: str) -> str:
    """Drop a last sentence that the token limit cut, unless it is the only one."""
    words = " ".join(text.split())
    ends = [found.end() for found in _SENTENCE_END.finditer(words)]
    return words[: ends[-1]] if ends else words


# Statements of the language first, then its concepts.
_TOPICS = (
    *("for", "while", "lambda", "return", "assert", "del", "global", "pass"),
    *("break", "continue", "if", "nonlocal", "yield", "with", "class", "raise", "async", "await"),
    *("booleans", "truth", "dict", "lists", "slicings", "subscriptions", "numbers", "context-managers", "exceptions"),
)
# A slot of the embedded model holds 2,048 tokens; prompts and the answer need some 500 of them.
_MAX_CHARACTERS = 1900
_MAX_TOKENS = 1500
_MAX_FILE_BYTES = 50_000_000
_LABEL = 40
_PIECES = re.compile(r"[A-Za-z]+|\s+|.", re.DOTALL)
_ASCII = 127


class Passage(Struct, frozen=True, kw_only=True):
    label: str  # the topic or file name, with a number if there are several passages
    text: str


class Selection(Struct, frozen=True, kw_only=True):
    passages: tuple[Passage, ...]
    available: int  # passages of all sources


def select_passages(files: Sequence[Path], *, count: int) -> Selection:
    """Return passages of the sources in turn, so that each source is represented."""
    sources = _read(files) if files else topics()
    cut = [list(passages_of(label, text)) for label, text in sources]
    turns = [group[turn] for turn in range(max(map(len, cut), default=0)) for group in cut if turn < len(group)]
    chosen = {id(passage) for passage in turns[:count]}
    passages = tuple(passage for group in cut for passage in group if id(passage) in chosen)
    return Selection(passages=passages, available=len(turns))


def topics() -> list[tuple[str, str]]:
    """Return (name, text) of topics of the language reference."""
    from pydoc_data.topics import topics as carried

    return [(name, carried[name]) for name in _TOPICS if name in carried]


def _read(files: Sequence[Path]) -> list[tuple[str, str]]:
    sources: list[tuple[str, str]] = []
    problems: list[str] = []
    names = [file.name for file in files]
    for file in files:
        try:
            if file.stat().st_size > _MAX_FILE_BYTES:
                problems.append(f"'{file}' is larger than {_MAX_FILE_BYTES // 1_000_000} MB")
                continue
            text = file.read_bytes().decode("utf-8-sig")
        except FileNotFoundError:
            problems.append(f"there is no file '{file}'")
        except IsADirectoryError:
            problems.append(f"'{file}' is a directory: name the files in it")
        except OSError as error:
            problems.append(f"cannot read '{file}': {error.strerror or error}")
        except UnicodeDecodeError:
            problems.append(f"'{file}' is not UTF-8 text")
        else:
            if not text.strip():
                problems.append(f"'{file}' is empty")
            sources.append((file.name if names.count(file.name) == 1 else str(file), text))
    if problems:
        raise ValidationError("; ".join(problems))
    return sources


def passages_of(label: str, text: str) -> Iterator[Passage]:
    """Cut at paragraphs, else at lines, sentences or words."""
    # Rulers and runs of empty lines only cost tokens.
    without_rulers = re.sub(r"^[ \t]*([*=~^\"#+-])\1{3,}[ \t]*$", "", text, flags=re.MULTILINE)
    pieces = list(_cut(re.sub(r"\n\s*\n", "\n\n", without_rulers).strip()))
    for number, piece in enumerate(pieces, start=1):
        shown = screen_line(label, _LABEL)
        yield Passage(label=shown if len(pieces) == 1 else f"{shown}, part {number}", text=piece)


def _cut(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        rest = text[at : at + _MAX_CHARACTERS + 1]  # the whole text would be copied per passage
        size = _fitting(rest)
        if size < len(rest):  # cut at the best boundary, unless that would waste more than half
            ends = ((rest.rfind(mark, size // 2, size), len(mark)) for mark in ("\n\n", "\n", ". ", " "))
            size = next((end + length for end, length in ends if end > 0), size)
        if piece := rest[:size].strip():
            yield piece
        at += size
        while at < len(text) and text[at].isspace():
            at += 1


def _fitting(text: str) -> int:
    """Return how many leading characters fit."""
    tokens = 0
    for found in _PIECES.finditer(text):
        tokens += _piece_tokens(found[0])
        if tokens > _MAX_TOKENS or found.end() > _MAX_CHARACTERS:
            # A word that is longer than a passage is cut.
            return found.start() or min(_MAX_CHARACTERS, _MAX_TOKENS)
    return len(text)


def at_most_tokens(text: str) -> int:
    """Return an upper bound for ordinary words and numbers of any script."""
    return sum(_piece_tokens(found[0]) for found in _PIECES.finditer(text))


def _piece_tokens(piece: str) -> int:
    if piece.isspace():
        return 1
    if ord(piece[0]) > _ASCII:
        return len(piece.encode("utf-8", "surrogatepass"))
    return -(-len(piece) // 3)


_NOTE_TOKENS, _DIGEST_TOKENS = 40, BUDGET_TOKENS // 2  # maximum tokens of a note and of a joined text
# Small models repeat themselves and their prompts. A light penalty and a grammar for one paragraph prevent that.
_STYLE = {"temperature": 0, "repeat_penalty": 1.05, "grammar": r"root ::= [A-Z] [^\n#*`]+"}
LOCAL_SLOTS, OTHER_SLOTS = 4, 16  # concurrent model calls


class DemoTeam(Struct, frozen=True, kw_only=True):
    team: MapReduceEnsemble
    selection: Selection
    reader: ChatModel


def demo_team(files: Sequence[Path], *, chunks: int, llm: str, threads: int | None) -> DemoTeam:
    is_local = llm.partition(":")[0].strip() == "local"
    reader, editor = _models(llm, is_local=is_local, threads=threads)
    selection = select_passages(files, count=chunks)
    slots = LOCAL_SLOTS if is_local else OTHER_SLOTS
    team = digest_team(selection.passages, reader_llm=reader, editor_llm=editor, max_parallel_tasks=slots)
    paths = json.dumps([str(file.resolve()) for file in files])
    options = {"files": paths, "chunks": str(chunks), "model": llm, "threads": "" if threads is None else str(threads)}
    team = team.with_origin(f"{__name__}:{recorded_demo.__name__}", options, called="demo")
    return DemoTeam(team=team, selection=selection, reader=reader)


def recorded_demo(files: str = "[]", chunks: str = "8", model: str = "local", threads: str = "") -> MapReduceEnsemble:
    """`files` is a JSON list."""
    paths = [Path(file) for file in json.loads(files)]
    return demo_team(paths, chunks=int(chunks), llm=model, threads=int(threads) if threads else None).team


def _models(llm: str, *, is_local: bool, threads: int | None) -> tuple[ChatModel, ChatModel]:
    from ensemble_ray.llm.factory import resolve_llm
    from ensemble_ray.llm.local import LocalChatModel

    name = llm.partition(":")[2].strip()
    if not is_local:
        kind = type(cast("OpenAIChatModel", resolve_llm(llm)))
        return kind(name, max_tokens=_NOTE_TOKENS * 2), kind(name, max_tokens=_DIGEST_TOKENS * 2)
    style: dict[str, Any] = {**_STYLE, "threads": threads}
    reader = LocalChatModel(name or None, max_tokens=_NOTE_TOKENS, **style)
    editor = LocalChatModel(name or None, max_tokens=_DIGEST_TOKENS, **style)
    if not reader.path.is_file():
        raise ValidationError(f"There is no model file '{reader.path}'")
    return reader, editor


def probe() -> Ensemble:
    task = Task(name="probe", description="Say ready", expected_output="ready", handler=lambda _context: "ready")
    return Ensemble(tasks=[task])


_WATCH_S = 0.02
_GONE_S = 10.0  # time in which killed processes disappear
OUR_PROGRAM = (sys.executable, "-m", "ensemble_ray.cli")


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a session, and wait, so that no process writes afterwards."""
    # Ray's processes have separate groups. SIGSTOP first: a process that sees another one die keeps working for a while.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in _session_of(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    process.wait()
    deadline = time.monotonic() + _GONE_S
    while _session_of(process) and time.monotonic() < deadline:
        time.sleep(_WATCH_S)


def _session_of(process: subprocess.Popen[bytes]) -> list[int]:
    listed = subprocess.run(["ps", "-axo", "pid=,stat="], capture_output=True, text=True, check=True)  # noqa: S607  its path differs between systems
    found: list[int] = []
    for line in listed.stdout.splitlines():
        pid, _, state = line.strip().partition(" ")
        with contextlib.suppress(OSError):  # it is gone already
            if "Z" not in state and os.getsid(int(pid)) == process.pid:
                found.append(int(pid))
    return found


class Comparison(Struct, frozen=True, kw_only=True):
    """Model answers in the record at the kill, and at the end."""

    before: Sequence[Fact[ModelAnswered]]  # in record order
    after: Sequence[Fact[ModelAnswered]]
    slots: int  # concurrent model calls

    @property
    def asked_after(self) -> Sequence[Fact[ModelAnswered]]:
        kept = {fact.seq for fact in self.before}
        return [fact for fact in self.after if fact.seq not in kept]

    @property
    def asked_again(self) -> Sequence[Fact[ModelAnswered]]:
        """The library promises that there are none."""
        answered = {fact.name for fact in self.before}
        return [fact for fact in self.asked_after if fact.name in answered]

    @property
    def most_in_flight(self) -> int:
        """Only the endpoint knows the exact number."""
        return min(self.slots, sum(_is_note(fact) for fact in self.asked_after))

    @property
    def is_kept(self) -> bool:
        """Whether answers before the kill are unchanged and were not repeated."""
        kept = [fact for fact in self.after if fact not in self.asked_after]
        return not self.asked_again and kept == list(self.before)

    def table(self) -> str:
        answered = {fact.name for fact in self.before}
        rows = [("model call", "before the kill", "after it")]
        for fact in (*self.before, *self.asked_after):
            call, latency = fact.name.partition("#")[0], f"{fact.data.latency_s:.1f} s"
            was_before = "answered" if fact.name in answered else "-"
            rows.append((call, latency, "-") if fact in self.before else (call, was_before, latency))
        rows.append(("answered", str(len(self.before)), str(len(self.asked_after))))
        rows.append(("on their way in the kill, so asked twice", "", f"at most {self.most_in_flight}"))
        rows.append(("asked again though answered", "", str(len(self.asked_again))))
        one, two, three = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join(f"{call:<{one}}  {before:>{two}}  {after:>{three}}".rstrip() for call, before, after in rows)


def _is_note(fact: Fact) -> bool:
    return fact.name.startswith("map-")


def crash_and_resume(options: Sequence[str], *, run_id: str | None, passages: int, slots: int) -> int:
    """Kill the demo when half of its notes are answered, resume it, show its record."""
    run_id = run_id or f"demo-{new_run_id()[:8]}"
    answers = _kill_at(max(1, passages // 2), options, run_id)
    if answers is None:
        return FAILED
    write_note(
        f"\nKilled with SIGKILL: the demo and all that it started, when {len(answers)} model calls were answered."
    )
    for command in (["runs"], ["resume", run_id]):
        write_note(f"\n$ {own_command()} {' '.join(command)}")
        sys.stdout.flush()
        code = subprocess.run([*OUR_PROGRAM, *command], check=False).returncode  # noqa: S603  our own command
        if code != FINE:
            return code
    compared = Comparison(before=answers, after=_answers(run_id), slots=slots)
    write_note("\nModel calls in the record:\n")
    show(compared.table())
    write_note(
        f"\nThe {len(answers)} answers that were recorded before the kill were used again. The "
        f"{len(compared.asked_after)} calls after it had not been made before, or had no answer."
    )
    return FINE if compared.is_kept else FAILED


def _kill_at(half: int, options: Sequence[str], run_id: str) -> Sequence[Fact[ModelAnswered]] | None:
    """Return None if the demo ended before half of its notes were recorded."""
    # A display that redraws itself would leave the terminal without its cursor.
    environment = {**os.environ, "TERM": "dumb"}
    words = [*OUR_PROGRAM, "demo", *options, "--run-id", run_id]
    process = subprocess.Popen(words, env=environment, start_new_session=True)  # noqa: S603  our own command
    try:
        while process.poll() is None:
            time.sleep(_WATCH_S)
            if sum(map(_is_note, _answers(run_id))) >= half:
                kill_session(process)
                return _answers(run_id)
    finally:
        if process.poll() is None:
            kill_session(process)
    write_note(f"The demo ended with exit code {process.returncode} before it could be killed.")
    return None


def _answers(run_id: str) -> list[Fact[ModelAnswered]]:
    from ensemble_ray.record.history import ModelReplied, RunHistory
    from ensemble_ray.record.opening import store_at
    from ensemble_ray.runtime import connect

    facts, history = asyncio.run(store_at(connect("inline").store_address).facts(run_id)), RunHistory()
    return [each.fact for fact in facts for each in history.apply(fact) if isinstance(each, ModelReplied)]


_START_S, _STOP_S = 300.0, 90.0  # a busy machine with two cores starts about ten processes
_PAUSE_S = 0.1
_ANSWER_S = 300.0
_LAST_LINES = 20
_QUESTION, _OTHER_QUESTION = "What is the moon?", "Why is the sea salty?"
#: YAML files by the name of their team.
_TEAMS = {
    "answer": """
stream: true
tasks:
  answer: {description: "Answer in one sentence: {question}", expected_output: One short sentence}
""",
    "letter": """
review_wait: detach
tasks:
  draft:
    description: Write one sentence that thanks {name} for help
    expected_output: One sentence
    review: {prompt: "Is the draft good?", timeout: 0}
  letter:
    description: Write to {name} in two sentences, from the draft, without a heading
    expected_output: A short letter
    context: [draft]
""",
}


class _Endpoint(Struct, frozen=True):
    url: str
    key: str

    def ask(self, method: str, path: str, body: object = None) -> Any:
        with self.open(method, path, body) as answer:
            return json.load(answer)

    def open(self, method: str, path: str, body: object = None) -> Any:
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        return urlopen(Request(self.url + path, data, headers, method=method), timeout=_ANSWER_S)  # noqa: S310  its own address

    def events(self, run_id: str) -> Iterator[str]:
        with self.open("GET", f"/runs/{run_id}/events") as answer:
            for line in answer:
                name, _, value = line.decode().strip().partition(": ")
                if name == "event":
                    yield value


def serve_and_ask(llm: str) -> int:
    """Start an endpoint, call it with the openai client, decide a review over HTTP, stop it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM stops the endpoint too, like Ctrl-C
    with tempfile.TemporaryDirectory(prefix="ensemble-ray-demo-") as place:
        folder = Path(place)
        model = json.dumps({"model": llm.removeprefix("openai:"), "max_tokens": 48, "temperature": 0})
        files = [folder / f"{name}.yaml" for name in _TEAMS]
        for file, team in zip(files, _TEAMS.values(), strict=True):
            file.write_text(f"llm: {model}{team}", encoding="utf-8")
        try:
            with _serving(folder, files) as endpoint:
                _ask_as_openai(endpoint)
                _decide_a_review(endpoint)
        except (OSError, EnsembleError) as error:
            write_note(f"The demonstration failed: {error}")
            return FAILED
        write_note("Stopped. The temporary files are removed.")
        return FINE


def _ask_as_openai(endpoint: _Endpoint) -> None:
    from openai import OpenAI, OpenAIError

    said: Any = [{"role": "user", "content": _QUESTION}]
    try:
        with OpenAI(base_url=f"{endpoint.url}/v1", api_key=endpoint.key, timeout=_ANSWER_S, max_retries=0) as client:
            write_note(f"\nclient.models.list(): {', '.join(sorted(each.id for each in client.models.list()))}")
            begun = time.monotonic()
            answer = client.chat.completions.create(model="answer", messages=said)
            took_s = time.monotonic() - begun
            write_note(f"\nclient.chat.completions.create(model='answer'), {_QUESTION!r}, in {took_s:.1f} s:")
            write_note(f"  {answer.choices[0].message.content}")
            write_note(f"  run {answer.id}, {answer.usage.total_tokens if answer.usage else '?'} tokens")
            _stream(client)
    except OpenAIError as error:
        raise EnsembleError(f"the endpoint answered the openai client: {error}") from error


def _stream(client: Any) -> None:
    write_note(f"\nclient.chat.completions.create(model='answer', stream=True), {_OTHER_QUESTION!r}:")
    begun, first_s, pieces = time.monotonic(), None, 0
    said = [{"role": "user", "content": _OTHER_QUESTION}]
    write_part("  ")
    for chunk in client.chat.completions.create(model="answer", messages=said, stream=True):
        if piece := chunk.choices[0].delta.content if chunk.choices else None:
            first_s = first_s or time.monotonic() - begun
            pieces += 1
            write_part(piece)
    write_note(
        f"\n  {pieces} pieces, the first after {first_s or 0:.1f} s, the last after {time.monotonic() - begun:.1f} s"
    )


def _decide_a_review(endpoint: _Endpoint) -> None:
    body = {"ensemble": "letter", "inputs": {"name": "Ada"}, "run_id": "letter-to-ada"}
    write_note(f"\nPOST /runs?wait=300 {json.dumps(body)}")
    run = endpoint.ask("POST", f"/runs?wait={_ANSWER_S:.0f}", body)
    write_note(f"  {run['status']}: it holds no process while it waits")
    write_note("\nGET /reviews")
    (review,) = endpoint.ask("GET", "/reviews")["reviews"]
    write_note(f"  {review['prompt']} {review['task_output']}")
    decision = {"decision": "edit", "text": "Thank you for your help with the machine, Ada.", "comment": "Warmer"}
    write_note(f"\nPOST /reviews/{review['run_id']}/{review['gate_id'][:8]}... {json.dumps(decision)}")
    decided = endpoint.ask("POST", f"/reviews/{review['run_id']}/{review['gate_id']}", decision)
    write_note(f"  {decided['decision']}: the run continues")
    write_note("\nGET /runs/letter-to-ada/events")
    for event in endpoint.events("letter-to-ada"):
        write_note(f"  {event}")
    found = endpoint.ask("GET", "/runs/letter-to-ada")
    if found["status"] != "completed":
        raise EnsembleError(f"the run ended as {found['status']}: {found['error']}")
    write_note(f"\nThe letter:\n  {found['result']['raw']}")


@contextlib.contextmanager
def _serving(folder: Path, files: list[Path]) -> Generator[_Endpoint]:
    environment = {**os.environ, "ENSEMBLE_RAY_HOME": str(folder / "home"), "TERM": "dumb"}
    for name in ("ENSEMBLE_RAY_STORE", "RAY_ADDRESS"):
        environment.pop(name, None)
    words = [*OUR_PROGRAM, "keys", "add", "demo", "--teams", "*", "--rights", "run,read,review"]
    made = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)  # noqa: S603  our own command
    key = made.stdout.strip()
    if made.returncode != FINE:
        raise EnsembleError(f"no key could be made: {made.stderr.strip()}")
    write_note(f"$ {own_command()} keys add demo --teams '*' --rights run,read,review\n  erk_...{key[-4:]}")
    write_note(f"\n$ {own_command()} serve {' '.join(file.name for file in files)} --port 0")
    log = folder / "log"
    begun = time.monotonic()
    words = [*OUR_PROGRAM, "serve", *map(str, files), "--port", "0"]
    with log.open("wb") as output:  # Ctrl-C reaches only this process, which then stops the endpoint
        process = subprocess.Popen(  # noqa: S603  our own command
            words, env=environment, stdout=output, stderr=output, cwd=folder, start_new_session=True
        )
    try:
        url = _address(process, log)
        write_note(f"  {url} answers after {time.monotonic() - begun:.1f} s")
        yield _Endpoint(url, key)
    finally:
        write_note("\nStopping the endpoint.")
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            kill_session(process)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until an endpoint answers."""
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            _, found, rest = line.partition("] at http://")
            if found and line.endswith("(Ctrl-C stops)"):
                return f"http://{rest.split()[0]}"
        time.sleep(_PAUSE_S)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
    raise EnsembleError("the endpoint did not start. Its last words:\n" + "\n".join(lines))


T = TypeVar("T", Ensemble, MapReduceEnsemble)

_PORT = 7328


def show_in_studio(team: T, run: Callable[[T], int], wait: Callable[[], object] | None = None) -> int:
    """Serve the team's page until Ctrl-C, or until `wait` returns."""
    dashboard = _start_dashboard()
    try:
        write_note(f"Studio: http://127.0.0.1:{dashboard.actual_port}/")
        code = run(team.model_copy(update={"dashboard": dashboard}))
        if code != INTERRUPTED:
            write_note(f"The run stays at http://127.0.0.1:{dashboard.actual_port}/ until Ctrl-C.")
            try:
                (wait or threading.Event().wait)()
            except KeyboardInterrupt:
                write_note("Stopped.")
    finally:
        dashboard.stop()
    return code


def _start_dashboard() -> WebDashboard:
    """If another program uses the usual port, use any free one."""
    dashboard = WebDashboard(port=_PORT, host="127.0.0.1")
    try:
        dashboard.start()
    except ValidationError:  # packages are missing: another port does not help
        raise
    except EnsembleError:
        dashboard = WebDashboard(port=0, host="127.0.0.1")
        dashboard.start()
    return dashboard
