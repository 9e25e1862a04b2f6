"""Pictures, audio and files that tools return: in the conversation, on the wire, in the record, and in a resumed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ensemble_ray import (
    Audio,
    Ensemble,
    ExitReason,
    Image,
    OpenAIChatModel,
    Runtime,
    ToolCall,
    fork,
    resume,
    tool,
)
from ensemble_ray.facts.effects import ToolReturned
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.record.view.tree import render_tree
from ensemble_ray.testing import ModelServer, ScriptedModel, assert_attached
from tests.builders import agent, answer, call, task
from tests.media import PNG, WAV, make_png

_OTHER = make_png((1, 2, 3))
_ATTACHED = "Attached, in this order:\n- plot.png, from the tool 'plot'\n- photo.png, from the tool 'photograph'"


def _tools(place: Path) -> list[Callable[..., object]]:
    """Two tools that return pictures: of bytes with a text, and of a file. Each call leaves a line in a file."""
    (place / "photo.png").write_bytes(_OTHER)

    def note(name: str) -> None:
        with (place / "calls").open("a") as file:
            file.write(f"{name}\n")

    @tool(effect="none")
    def plot() -> list[object]:
        """Draw a plot."""
        note("plot")
        return ["the plot:", Image(PNG, name="plot.png")]

    @tool(effect="once")
    def photograph() -> Image:
        """Take a photo."""
        note("photograph")
        return Image(place / "photo.png")

    return [plot, photograph]


def _calls(place: Path) -> list[str]:
    return sorted((place / "calls").read_text().splitlines())


def test_model_sees_pictures_when_tools_return_them(runtime: Runtime, home: str, tmp_path: Path) -> None:
    """S-ATT-61, S-ATT-62, S-ATT-63, S-ATT-75: after the results of the turn; by hash in the record; named in the trace."""
    model = ScriptedModel([call("plot"), call("photograph")], "seen", reads=["image"])
    team = Ensemble(tasks=[task("look", agent(model, tools=_tools(tmp_path)))])
    output = team.run(runtime=runtime, run_id="seen")
    assert output.raw == "seen"
    *_, asked, first, second, shown = model.calls[-1].messages
    assert [asked.role, first.role, second.role, shown.role] == ["assistant", "tool", "tool", "user"]
    assert (first.content, second.content) == ("the plot:\n[image plot.png]", "[image photo.png]")
    assert shown.content == _ATTACHED
    assert_attached(model.calls[0])
    assert_attached(model.calls[1], PNG, tmp_path / "photo.png")
    assert output.trace is not None
    (interaction, _) = output.trace.task_traces[0].llm_interactions
    assert [[each["name"] for each in one.attachments] for one in interaction.tool_calls] == [
        ["plot.png"],
        ["photo.png"],
    ]
    assert "returned plot.png (image/png, 73 bytes)" in render_tree(output.trace)
    store = store_at(StoreAddress.of(home))
    facts = [fact.data for fact in run_blocking(store.facts("seen")) if isinstance(fact.data, ToolReturned)]
    references = [each for fact in facts for each in fact.attachments]
    assert {each.name: each.data for each in references} == {"plot.png": None, "photo.png": None}
    stored = {each.name: run_blocking(store.read_content("seen", each.sha256)) for each in references}
    assert stored == {"plot.png": PNG, "photo.png": _OTHER}


def test_resumed_turn_has_the_same_pictures_when_a_run_was_cut(runtime: Runtime, home: str, tmp_path: Path) -> None:
    """S-ATT-64: no tool is called again, contents come from the record, also if the file has changed; a fork has them too."""
    asked = answer("", 900, 200, calls=[call("plot"), call("photograph")])
    model = ScriptedModel(asked, "seen", "again", reads=["image"])
    tools = _tools(tmp_path)
    team = Ensemble(tasks=[task("look", agent(model, tools=tools)), task("tell", agent(model), name="tell")])
    assert team.run(runtime=runtime, run_id="cut", max_tokens=1000).exit_reason is ExitReason.BUDGET_EXHAUSTED
    assert _calls(tmp_path) == ["photograph", "plot"]
    (tmp_path / "photo.png").write_bytes(b"other")
    assert resume("cut", team, runtime=runtime, max_tokens=100_000).raw == "again"
    assert _calls(tmp_path) == ["photograph", "plot"]
    assert_attached(model.calls[1], PNG, _OTHER)
    (tmp_path / "photo.png").write_bytes(_OTHER)
    whole = ScriptedModel(asked, "seen", reads=["image"])
    Ensemble(tasks=[task("look", agent(whole, tools=tools))]).run(runtime=runtime)
    assert whole.calls[1].messages == model.calls[1].messages
    (tmp_path / "photo.png").unlink()
    retold = ScriptedModel("told", reads=["image"])
    forked = Ensemble(tasks=[task("look", agent(model, tools=tools)), task("tell", agent(retold), name="tell")])
    assert fork("cut", "tell", forked, new_run_id="forked", runtime=runtime, max_tokens=100_000).raw == "told"
    assert run_blocking(store_at(StoreAddress.of(home)).read_content("forked", Image(_OTHER).sha256)) == _OTHER


def test_text_says_what_was_left_out_when_the_model_does_not_read_it(home: str, tmp_path: Path) -> None:
    """S-ATT-65: the model knows that it does not see it, and the run goes on; an unreadable file is an error of the tool."""

    @tool(effect="none")
    def listen() -> list[object]:
        """Listen."""
        return [Audio(WAV, name="call.wav"), Image(PNG, name="dot.png")]

    @tool(effect="none")
    def lose() -> Image:
        """Return what is not there."""
        return Image(tmp_path / "gone.png")

    model = ScriptedModel([call("listen"), call("lose")], "seen", reads=["image"])
    Ensemble(tasks=[task("look", agent(model, tools=[listen, lose]))]).run(runtime="inline", run_id="left")
    *_, first, second, shown = model.calls[-1].messages
    assert first.content == (
        "[audio call.wav]\n[image dot.png]\n[audio call.wav] was left out: the model does not read audio attachments"
    )
    assert (second.content or "").startswith(
        f"Tool error: Image '{tmp_path / 'gone.png'}' cannot be read: No such file"
    )
    assert [each.name for each in shown.attachments] == ["dot.png"]
    blind = ScriptedModel(call("listen"), "done")
    output = Ensemble(tasks=[task("look", agent(blind, tools=[listen]))]).run(runtime="inline")
    assert output.raw == "done"
    assert [message.role for message in blind.calls[-1].messages] == ["system", "user", "assistant", "tool"]


def test_pictures_follow_the_results_when_they_are_sent(
    model_server: Callable[..., ModelServer], tmp_path: Path
) -> None:
    """S-ATT-61: chat completions accept only texts as results of tools; a wrapped list comes from memory without a record."""
    server = model_server([[ToolCall("a", "plot"), ToolCall("b", "photograph")], "seen"])
    model = OpenAIChatModel("m", api_key="k", base_url=server.base_url)
    team = Ensemble(tasks=[task("look", agent(model, tools=_tools(tmp_path)))])
    assert team.run(runtime="inline", durability="off").raw == "seen"
    *_, first, second, shown = server.requests[-1].messages
    assert (first["content"], second["content"]) == ("the plot:\n[image plot.png]", "[image photo.png]")
    parts = shown["content"]
    assert isinstance(parts, list)
    assert [part["type"] for part in parts] == ["text", "image_url", "image_url"]
    assert parts[0]["text"] == server.requests[-1].text == _ATTACHED
    assert_attached(server.requests[-1], PNG, _OTHER)
