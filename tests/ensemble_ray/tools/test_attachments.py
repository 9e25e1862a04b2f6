"""Pictures, audio and files that tools return: the text for the model, and the attachments beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ensemble_ray import Audio, File, FileReadTool, Image, ToolResult, WebScraperTool, tool
from ensemble_ray.tools.call import call_tool
from ensemble_ray.tools.registry import resolve_tools
from ensemble_ray.tools.tool import ToolContext, as_result, outcome_of_return
from ensemble_ray.tools.web.net import WebAnswer
from tests.media import JPEG, PNG, SVG, WAV

_PLOT = Image(PNG, name="plot.png")
_CALL = Audio(WAV, name="call.wav")


@pytest.mark.parametrize(
    ("value", "text", "attachments"),
    [
        (_PLOT, "[image plot.png]", (_PLOT,)),
        (["the plot:", _PLOT, 3, _CALL], "the plot:\n[image plot.png]\n3\n[audio call.wav]", (_PLOT, _CALL)),
        ((_PLOT, {"max": 2}), '[image plot.png]\n{"max":2}', (_PLOT,)),
        (File("report.pdf"), "[file report.pdf]", (File("report.pdf"),)),
    ],
)
def test_text_names_attachments_when_a_tool_returns_them(
    value: object, text: str, attachments: tuple[object, ...]
) -> None:
    """S-ATT-60: alone, or in a list or tuple; also inside a `ToolResult`; they are no structured output."""
    for outcome in (outcome_of_return(value), outcome_of_return(ToolResult.success(value))):
        assert (outcome.text, outcome.attachments, outcome.structured_output) == (text, attachments, None)
        assert outcome.outcome == "success"
    assert as_result(value) == ToolResult.success(value) == ToolResult(text, None, None, attachments)  # type: ignore[arg-type]
    assert ToolResult.success(value, {"n": 1}).structured_output == {"n": 1}


def test_list_stays_data_when_it_has_no_attachments() -> None:
    """S-ATT-60, S-TOOL-14: lists of other values, and attachments inside of data, are JSON; contents never are."""
    assert outcome_of_return(["a", 1]).text == '["a",1]'
    found = outcome_of_return({"picture": _PLOT})
    assert (found.text, found.attachments) == ('{"picture":"plot.png"}', ())


@pytest.mark.parametrize("is_cpu", [False, True])
async def test_attachments_reach_the_outcome_when_a_function_is_called(*, is_cpu: bool) -> None:
    """S-ATT-60: of a function, also of one that yields."""

    @tool(effect="none", cpu=is_cpu)
    def draw() -> object:
        yield "first"
        yield _PLOT

    (bound,) = [resolve_tools([draw]).get("draw")]
    assert bound is not None
    outcome = await call_tool(bound, "{}", context=ToolContext(tool_name="draw"))
    assert (outcome.text, outcome.attachments) == ("first\n[image plot.png]", (_PLOT,))


@pytest.mark.parametrize("data", [PNG, JPEG])
def test_picture_is_attached_when_a_file_is_one(tmp_path: Path, data: bytes) -> None:
    """S-ATT-66: by its content, whatever its name; other binary files stay refused."""
    (tmp_path / "notes.txt").write_bytes(data)
    (tmp_path / "drawing.svg").write_bytes(SVG)
    (tmp_path / "call.wav").write_bytes(WAV)
    reader = FileReadTool(tmp_path)
    found = reader.execute('{"path": "notes.txt"}')
    assert (found.output, found.attachments) == ("[image notes.txt]", (Image(data, name="notes.txt"),))
    assert reader.execute('{"path": "drawing.svg"}').output == SVG.decode()
    assert "not UTF-8 text" in (reader.execute('{"path": "call.wav"}').error_message or "")


async def test_picture_is_attached_when_a_page_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-ATT-66: it passed the rules of the web tools; one that was cut is refused."""
    is_truncated = False

    async def fetch(*_: object, **__: object) -> WebAnswer:
        return WebAnswer(status=200, headers={}, body=PNG, is_truncated=is_truncated)

    monkeypatch.setattr("ensemble_ray.tools.builtin.web.fetch", fetch)
    scraper = WebScraperTool()
    found = await scraper.aexecute('{"url": "https://example.com/a/dot.png?size=2"}')
    assert (found.output, found.attachments) == ("[image dot.png]", (Image(PNG, name="dot.png"),))
    is_truncated = True
    cut = await scraper.aexecute('{"url": "https://example.com/a/dot.png"}')
    assert cut.error_message == "Failed to fetch URL: the picture is larger than 5,242,880 bytes"
