"""Runs with pictures, audio and files: what models receive, what records contain, and what goes on after a death."""

from __future__ import annotations

import base64
import json
import sqlite3
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from ensemble_ray import (
    Agent,
    AgentExecutionError,
    AgentOutput,
    Audio,
    CaptureMode,
    Ensemble,
    EnsembleListener,
    File,
    Image,
    LlmIterationStartedEvent,
    MapEnsemble,
    MapReduceEnsemble,
    PromptTemplateError,
    RecordError,
    Runtime,
    Task,
    TaskExecutionError,
    TaskHandlerContext,
    TaskInputEvent,
    UnreadableAttachmentError,
    ValidationError,
    Workflow,
    fork,
    resume,
)
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.record.sqlite.losses import RECORD
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.testing import Fault, ModelServer, ScriptedCall, ScriptedModel
from tests.builders import agent, task, task_after
from tests.command_line import call_command, environment_of
from tests.scenarios import dying_attachments
from tests.scenarios.dying import kill_first, staying
from tests.scenarios.dying_attachments import DIED, MODEL, PLACE, PNG, RUN_ID
from tests.scenarios.teams import PATIENCE_S, Forever, Marks, prompt_of, until, wait_for
from tests.template import run_forked

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("image", "audio", "file")
WAV = b"RIFF\0\0\0\0WAVE..."


def seen(asked: ScriptedCall) -> list[tuple[str, str, bytes | None]]:
    """Kind, name and content of what a model call received."""
    return [(each.kind, each.name, each.data) for message in asked.messages for each in message.attachments]


def files(place: Path, **contents: bytes) -> Path:
    """Write pictures of these contents and return their directory."""
    for name, content in contents.items():
        (place / f"{name}.png").write_bytes(PNG + content)
    return place


@pytest.mark.parametrize("durability", ["effects", "off"])
def test_model_receives_attachments_of_its_task_and_of_the_inputs_it_names(
    runtime: Runtime, tmp_path: Path, durability: str
) -> None:
    """S-ATT-10, S-ATT-11, S-ATT-22, S-ATT-32, S-ATT-33: with their contents, each once; other tasks receive none."""
    place = files(tmp_path, a=b"a")
    model = ScriptedModel("one", "two", reads=KINDS)
    looking = task(
        "Compare {photo} with {others}",
        agent(model),
        attachments=[Image(place / "{name}.png"), File(b"notes", name="notes.txt")],
    )
    photo, sound = Image(PNG + b"p", name="p.png"), Audio(WAV, name="s.wav")
    output = Ensemble(tasks=[looking, task("Sum up", agent(model))], workflow="sequential", durability=durability).run(
        {"name": "a", "photo": photo, "others": [sound, photo]}, runtime=runtime
    )
    assert output.task_outputs[0].task_description == "Compare p.png with s.wav, p.png"
    first, second = model.calls
    assert seen(first) == [
        ("image", "a.png", PNG + b"a"), ("file", "notes.txt", b"notes"), ("image", "p.png", PNG + b"p"),
        ("audio", "s.wav", WAV),
    ]  # fmt: skip
    assert prompt_of(first).endswith(
        "## Expected Output\na text\n\n## Attachments\n- image: a.png\n- file: notes.txt\n- image: p.png\n- audio: s.wav"
    )
    assert (seen(second), "Attachments" in prompt_of(second)) == ([], False)


def test_record_contains_each_content_once_and_references_elsewhere(
    runtime: Runtime, tmp_path: Path, home: str
) -> None:
    """S-ATT-30, S-ATT-31, S-ATT-37: neither facts nor traces nor events contain a content, a path or a URL."""
    content = b"content" * 500
    place = files(tmp_path, a=content)
    heard: list[TaskInputEvent | LlmIterationStartedEvent] = []

    class Listener(EnsembleListener):
        def on_task_input(self, event: TaskInputEvent) -> None:
            heard.append(event)

        def on_llm_iteration_started(self, event: LlmIterationStartedEvent) -> None:
            heard.append(event)

    picture = Image(place / "a.png")
    model = ScriptedModel("one", "two", reads=KINDS)
    tasks = [task(text, agent(model), attachments=[picture]) for text in ("One", "Two")]
    output = Ensemble(
        tasks=tasks, workflow="sequential", listeners=[Listener()], capture_mode=CaptureMode.STANDARD
    ).run(runtime=runtime)
    assert [seen(each) for each in model.calls] == [[("image", "a.png", PNG + content)]] * 2
    reference = Image(PNG + content, name="a.png").as_reference()
    shown = {**reference.to_json(), "origin": picture.origin}
    assert output.trace is not None
    for trace in output.trace.task_traces:
        assert trace.prompts is not None
        assert [dict(each) for each in trace.prompts.attachments] == [shown]
        assert [dict(each) for each in trace.llm_interactions[0].messages[1].attachments] == [shown]
    assert len(heard) == 4
    assert {each for event in heard if isinstance(event, TaskInputEvent) for each in event.attachments} == {reference}
    attached = [
        each for event in heard if isinstance(event, LlmIterationStartedEvent) for each in event.messages[1].attachments
    ]
    assert [(each, each.data, each.source) for each in attached] == [(reference, None, "")] * 2
    texts = [json.dumps(fact.data.to_data(), default=str) for fact in RunDirectory(Path(home), output.run_id).facts()]
    texts.append(output.trace.model_dump_json())
    for part in ("contentcontent", base64.b64encode(content).decode()[:40], str(place)):
        assert not [text for text in texts if part in text]
    with sqlite3.connect(RunDirectory(Path(home), output.run_id).path / RECORD) as connection:
        rows = connection.execute("SELECT length(body) FROM bodies WHERE sha256 = ?", [reference.sha256]).fetchall()
    assert rows == [(len(PNG + content),)]


def _error_of(runtime: Runtime, ensemble: Ensemble, inputs: dict[str, object] | None = None) -> Exception:
    with pytest.raises((ValidationError, PromptTemplateError)) as refused:
        ensemble.run(inputs, runtime=runtime)
    return refused.value


def test_unreadable_attachment_is_refused_before_the_first_call(inline_runtime: Runtime, tmp_path: Path) -> None:
    """S-ATT-10, S-ATT-12, S-ATT-17, S-ATT-23, S-ATT-27, S-ATT-41: what, where, and what to do."""
    model = ScriptedModel(otherwise="never", reads=("image",))
    picture = Image(PNG, name="a.png")

    def refused(*attachments: File | Image | Audio, llm: object = model, **fields: object) -> str:
        last = task("Look", agent(llm), name="look", attachments=attachments)
        tasks = [task("First", agent(model, "First")), last]
        return str(_error_of(inline_runtime, Ensemble(tasks=tasks, **{"workflow": "sequential", **fields})))

    missing = tmp_path / "b.png"
    assert refused(Image(missing)) == (
        f"Task 'look': Image '{missing}' cannot be read: No such file or directory. Looked for: {missing}"
    )
    assert refused(Image("{where}/b.png")).startswith("Missing template variables: [where]")
    assert refused(picture, Audio(WAV, name="s.wav")) == (
        "Task 'look': ScriptedModel does not read Audio 's.wav'; it reads only image. Choose a model that reads audio "
        "attachments, or declare that it does: reads=('audio',)"
    )
    assert "does not read Image 'a.png'; it reads no attachments" in refused(picture, llm=ScriptedModel("never"))
    assert "a manager passes only texts to its agents" in refused(picture, workflow=Workflow.HIERARCHICAL)
    assert "context_budget 900 is too small" in refused(picture, context_budget=900)
    inputs = {"photo": Image(missing)}
    naming = Ensemble(tasks=[task("Look at {photo}", agent(model))])
    assert str(_error_of(inline_runtime, naming, inputs)).startswith(f"Input 'photo': Image '{missing}' cannot be read")
    assert model.calls == ()


class Runner:
    """Another framework's agent."""

    def run(self, request: object) -> str:
        """Never called."""
        raise AssertionError(request)


def test_runner_receives_no_attachments(inline_runtime: Runtime) -> None:
    """S-ATT-27."""
    looking = task(
        "Look", Agent(role="Writer", goal="g", runner=Runner()), name="look", attachments=Image(PNG, name="a.png")
    )
    assert str(_error_of(inline_runtime, Ensemble(tasks=[looking]))) == (
        "Task 'look' has Image 'a.png', and its agent 'Writer' has a runner, which receives texts only. Use an agent with a "
        "model, or pass the file's path or URL in the text"
    )


def test_model_that_a_directive_chose_must_read_the_attachment(inline_runtime: Runtime) -> None:
    """S-ATT-23: the request is not sent, and the task fails with that error as its cause."""
    asked, switched = threading.Event(), threading.Event()

    def wait(_: TaskHandlerContext) -> str:
        asked.set()
        wait_for(switched)
        return "waited"

    other, waiting = ScriptedModel("never"), task("Wait", handler=wait)
    looking = task_after("Look", waiting, agent=agent(ScriptedModel("never", reads=KINDS)), attachments=Image(PNG))
    run = Ensemble(tasks=[waiting, looking], models={"other": other}, workflow="sequential").start(
        runtime=inline_runtime
    )
    wait_for(asked)
    run.switch_model("other")
    switched.set()
    with pytest.raises(TaskExecutionError) as failed:
        run.result(timeout_s=PATIENCE_S)
    assert isinstance(failed.value.__cause__, AgentExecutionError)
    assert isinstance(failed.value.__cause__.__cause__, UnreadableAttachmentError)
    assert other.calls == ()


def test_handler_receives_the_contents(runtime: Runtime, tmp_path: Path) -> None:
    """S-ATT-19."""

    def count(context: TaskHandlerContext) -> str:
        return ", ".join(f"{each.name}: {len(each.data or b'')}" for each in context.attachments)

    counting = Task("Count", handler=count, attachments=[Image(files(tmp_path, a=b"12") / "a.png"), File(b"abc")])
    assert Ensemble(tasks=[counting]).run(runtime=runtime).raw == "a.png: 10, file.txt: 3"


def test_items_are_pictures(runtime: Runtime, tmp_path: Path) -> None:
    """S-ATT-18, S-ATT-26, S-ATT-33: one that cannot be read fails alone; a reduce receives the input that it names."""
    place = files(tmp_path, a=b"a", b=b"b")
    model = ScriptedModel(otherwise="seen", reads=KINDS)
    pictures = MapEnsemble(
        items=iter([Image(place / f"{name}.png") for name in ("a", "b", "c")]),
        map_task=lambda item: Task(f"Describe {item} in {{language}}", attachments=item),
        llm=model,
        on_item_error="collect",
    )
    output = pictures.run({"language": "Czech"}, runtime=runtime)
    assert sorted((prompt_of(each).splitlines()[1], *seen(each)) for each in model.calls) == [
        ("Describe a.png in Czech", ("image", "a.png", PNG + b"a")),
        ("Describe b.png in Czech", ("image", "b.png", PNG + b"b")),
    ]
    (failed,) = output.failed_items
    assert (failed.index, failed.error_type) == (2, "ValidationError")
    assert failed.message.startswith(f"Task 'Describe c.png in Czech': Image '{place / 'c.png'}' cannot be read")
    reducing = ScriptedModel(otherwise="all", reads=KINDS)
    MapReduceEnsemble(
        items=iter([1, 2]),
        map_task=lambda item: Task(f"Count {item}"),
        reduce_task=lambda chunk: Task("Sum up on {paper}", context=chunk),
        llm=reducing,
    ).run({"paper": Image(PNG, name="paper.png")}, runtime=runtime)
    assert [seen(each) for each in reducing.calls] == [[], [], [("image", "paper.png", PNG)]]


def test_run_goes_on_with_the_recorded_contents_when_files_are_gone(
    model_server: Callable[..., ModelServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """S-ATT-34, S-ATT-11: also the input is an attachment again; no recorded answer is requested again."""
    place, left = files(tmp_path, a=b"a"), dying_attachments.answers()
    server = model_server(lambda _: left.pop(0))
    monkeypatch.setenv(MODEL, server.base_url)
    monkeypatch.setenv(PLACE, str(place))
    script = "from tests.scenarios.dying_attachments import main; main()"
    done = run_forked([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == DIED, done.stderr
    (place / "a.png").unlink()
    assert resume(RUN_ID, dying_attachments.team()).raw == "three"
    assert len(server.requests) == 3
    pictures = [
        [part["image_url"]["url"] for part in request.messages[1]["content"][1:]]  # type: ignore[index]
        for request in server.requests
    ]
    own, photo = (Image(PNG + text).data_url for text in (b"a", b"photo"))
    assert pictures == [[own], [own, photo], [own, photo]]
    assert "Compare with photo.png" in json.dumps(server.requests[2].messages)


def test_cancelled_run_goes_on_with_the_recorded_contents(runtime: Runtime, tmp_path: Path) -> None:
    """S-ATT-34: on both runtimes, after a change of the file."""
    place, forever = files(tmp_path, a=b"a"), Forever()

    def team(*entries: object) -> tuple[ScriptedModel, Ensemble]:
        model = ScriptedModel(*entries, reads=KINDS)  # type: ignore[arg-type]
        return model, Ensemble(tasks=[task("Look at {photo}", agent(model), attachments=Image(place / "a.png"))])

    _, ensemble = team(forever)
    run = ensemble.start({"photo": Image(PNG, name="p.png")}, runtime=runtime)
    wait_for(forever.asked)
    run.cancel()
    run.result(timeout_s=PATIENCE_S)
    files(place, a=b"changed")
    model, again = team("seen")
    assert resume(run.id, again, runtime=runtime).raw == "seen"
    assert [seen(each) for each in model.calls] == [[("image", "a.png", PNG + b"a"), ("image", "p.png", PNG)]]


def test_task_goes_on_with_its_attachments_when_the_process_of_its_agent_dies(
    ray_runtime: Runtime, tmp_path: Path
) -> None:
    """S-ATT-33, S-DUR-31: the next process reads them from the record."""
    marks = Marks(tmp_path / "marks")
    model, worker = staying(marks)
    model.reads = KINDS
    looking = task("go", worker, attachments=Image(files(tmp_path, a=b"a") / "a.png"))
    run = Ensemble(tasks=[looking]).start(runtime=ray_runtime)
    until(lambda: marks.lines, "the tool")
    (tmp_path / "a.png").unlink()
    marks.add("over")
    kill_first(marks)
    assert run.result(timeout_s=PATIENCE_S).raw == "survived"
    assert [seen(each) for each in model.calls] == [[("image", "a.png", PNG + b"a")]] * 2


async def test_fork_has_the_contents_that_it_uses(inline_runtime: Runtime, tmp_path: Path, home: str) -> None:
    """S-ATT-35: in its own record; another attachment of a reused task is a change of its definition."""
    place = files(tmp_path, a=b"a", b=b"b")

    def team(first: str = "a", second: str = "a") -> tuple[ScriptedModel, Ensemble]:
        model = ScriptedModel(otherwise="seen", reads=KINDS)
        looks = [
            task(text, agent(model), name=text, attachments=Image(place / f"{name}.png"))
            for text, name in (("one", first), ("two", second))
        ]
        return model, Ensemble(tasks=looks, workflow="sequential")

    run_id = team()[1].run(runtime=inline_runtime).run_id
    (place / "a.png").unlink()
    with pytest.raises(
        ValidationError, match=r"the definition of reused tasks has changed: definition\.one\.attachments\.0"
    ):
        fork(run_id, "two", team(first="b")[1], runtime=inline_runtime)
    for name, content in (("a", b"a"), ("b", b"b")):
        model, ensemble = team(second=name)
        output = fork(run_id, "two", ensemble, runtime=inline_runtime)
        assert [seen(each) for each in model.calls] == [[("image", f"{name}.png", PNG + content)]]
        found = await SqliteStore(Path(home)).read_content(output.run_id, Image(PNG + content).sha256)
        assert found == PNG + content


def test_lost_content_is_named(inline_runtime: Runtime, tmp_path: Path, home: str) -> None:
    """S-ATT-36: the run ends with the error, and no request is sent."""
    forever, place = Forever(), files(tmp_path, a=b"lost")

    def team(*entries: object) -> tuple[ScriptedModel, Ensemble]:
        model = ScriptedModel(*entries, reads=KINDS)  # type: ignore[arg-type]
        return model, Ensemble(tasks=[task("Look", agent(model), attachments=Image(place / "a.png"))])

    run = team(forever)[1].start(runtime=inline_runtime)
    wait_for(forever.asked)
    run.cancel()
    run.result(timeout_s=PATIENCE_S)
    digest = Image(PNG + b"lost").sha256
    with sqlite3.connect(RunDirectory(Path(home), run.id).path / RECORD) as connection:
        connection.execute("UPDATE bodies SET body = ? WHERE sha256 = ?", [b"other", digest])
    model, again = team("never")
    with pytest.raises(RecordError, match=r"The record is damaged: Image 'a\.png' has another content than its hash"):
        resume(run.id, again, runtime=inline_runtime)
    with sqlite3.connect(RunDirectory(Path(home), run.id).path / RECORD) as connection:
        connection.execute("DELETE FROM bodies WHERE sha256 = ?", [digest])
    with pytest.raises(RecordError, match=rf"the content of Image 'a\.png' \({digest}\) is missing"):
        resume(run.id, again, runtime=inline_runtime)
    assert model.calls == ()


def test_digest_of_a_request_depends_on_its_attachments(inline_runtime: Runtime, home: str) -> None:
    """S-ATT-37: on content and name."""

    def digest(*attachments: Image) -> str:
        looking = task("Look", agent(ScriptedModel("seen", reads=KINDS)), attachments=attachments)
        run_id = Ensemble(tasks=[looking]).run(runtime=inline_runtime).run_id
        (fact,) = (each for each in RunDirectory(Path(home), run_id).facts() if isinstance(each.data, ModelAnswered))
        return fact.data.request_digest

    one, two = Image(PNG, name="a.png"), Image(PNG + b"2", name="a.png")
    assert digest(one) == digest(one)
    assert len({digest(each) for each in (one, two, Image(PNG, name="b.png"))} | {digest(), digest(one, two)}) == 5


def test_team_file_runs_with_the_file_of_an_input(model_server: Callable[..., ModelServer], tmp_path: Path) -> None:
    """S-ATT-13, S-ATT-14, S-ATT-20: from the command line to the request; variables of paths are inputs."""
    server = model_server(["a map", Fault(status=400, message="no")])
    files(tmp_path, a=b"a", b=b"b")
    (tmp_path / "team.yaml").write_text(
        "llm: openai:m\ntasks: {look: {description: 'Compare {photo}', attachments: '{name}.png'}}\n", encoding="utf-8"
    )
    environment = environment_of(tmp_path, server)
    missing = call_command(tmp_path, environment, "run", "team.yaml", "-i", "photo=@a.png")
    assert (missing.returncode, "name (used by look)" in missing.stderr) == (2, True), missing.stderr
    ended = call_command(tmp_path, environment, "run", "team.yaml", "-i", "photo=@a.png", "-i", "name=b")
    assert (ended.returncode, ended.stdout) == (0, "a map\n"), ended.stderr
    (request,) = server.requests
    failed = call_command(
        tmp_path, environment, "run", "team.yaml", "-i", "photo=@a.png", "-i", "name=b", "--run-id", "f"
    )
    assert failed.returncode == 1
    explained = call_command(tmp_path, environment, "trace", "f").stdout
    assert "Run it again when the cause is removed" in explained
    assert "--input" not in explained
    text, *pictures = cast("list[dict[str, Any]]", request.messages[1]["content"])
    assert "Compare a.png" in text["text"]
    assert [each["image_url"]["url"] for each in pictures] == [Image(PNG + each).data_url for each in (b"b", b"a")]


async def test_a_question_has_attachments(runtime: Runtime) -> None:
    """S-ATT-29: in each way to ask."""
    picture = Image(b"\x89PNG\r\n\x1a\n...", name="pier.png")
    model = ScriptedModel(otherwise="a pier", reads=["image"])
    viewer = Agent(role="Viewer", goal="Look", llm=model)
    answers = [
        viewer.run("Where is it?", attachments=picture, runtime=runtime),
        await viewer.arun("Where is it?", attachments=[picture], runtime=runtime),
        *[
            each
            for each in viewer.stream("Where is it?", attachments=picture, runtime=runtime)
            if isinstance(each, AgentOutput)
        ],
    ]
    assert [each.text for each in answers] == ["a pier"] * 3
    assert [[one.name for one in each.attachments] for each in model.calls] == [["pier.png"]] * 3
