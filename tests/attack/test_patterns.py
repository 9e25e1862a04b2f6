"""Texts that are made to be slow: what reads a model's answer, an argument or a file takes time in proportion to it.

Each reader of foreign text is fed repeated characters under a limit of processor time; a new one is a line of `TOOLS` or
`READERS`. The regular expressions themselves: `test_regular_expressions.py`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import ensemble_ray.tools.builtin as builtin_tools
from ensemble_ray import (
    Agent,
    AgentSynthesizer,
    AgentTool,
    CalculatorTool,
    DateTimeTool,
    FileReadTool,
    FileWriteTool,
    HttpAgentTool,
    HumanInputTool,
    JsonParserTool,
    ProcessAgentTool,
    PromptTemplateError,
    Task,
    ToolResult,
    ValidationError,
    WebScraperTool,
    WebSearchTool,
    extract_json,
    parse_output,
    resolve_template,
)
from ensemble_ray.cli.demo import passages_of, whole_sentences
from ensemble_ray.cli.inputs.arguments import read_inputs
from ensemble_ray.cli.view.terminal import screen_line
from ensemble_ray.definition.fields import braced_texts, escape_template, fill_inputs
from ensemble_ray.execute.delegation.decisions import read_call
from ensemble_ray.items.text_files import CsvFile, csv_rows, json_lines
from ensemble_ray.plan.planner import SynthesisContext
from ensemble_ray.record.journal import text_of
from ensemble_ray.record.runs import age_from
from ensemble_ray.teamfile.document import Problems, nearest, read_document
from ensemble_ray.teamfile.fields import ItemPrompt
from ensemble_ray.teamfile.references import is_reference
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.text.answers import ReasoningSplitter, split_reasoning
from ensemble_ray.tools.builtin.files import FileReadInput
from ensemble_ray.tools.builtin.process import _interpret
from ensemble_ray.tools.schema import ArgumentError, signature_of
from ensemble_ray.tools.tool import parse_input
from ensemble_ray.tools.web.net import CHARSETS, codec_of, decode
from tests.attack.processor_time import ProcessorTimeError, processor_limit

#: Processor time of one text, s: a slow machine needs a tenth of it, what is not linear a multiple of it.
LIMIT_S = 2.5
SIZE = 64_000
#: What is repeated.
PIECES = (
    *(" ", "\t", "\n", "\r\n", "a", "é", "1", "+", "-", ".", ",", ":", "=", "#", "&", "<", ">", "/", "\\", "`", "'", '"'),
    *("(", "[", "{", "]", "}", "[]", "{}", '{"', "[{", '["', '["",', '{"a":', "[1,", "1,", "- ", "a: ", "? ", "<a", "```"),
    *("```json\n", "{{", "{a", "1 ", "1+", "9^", "(-", "a.", "a b ", ". ", '."', "\n ", "\\u", "\\ud800", "\ud800", "\0"),
)  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """Something that reads foreign text."""

    read: Callable[[str], object]
    #: what stands before the repetition; each is tried
    before: tuple[str, ...] = ("",)
    #: what it raises for a text that it does not take
    refuses: tuple[type[Exception], ...] = ()
    size: int = SIZE


_TASK = Task(description="Look", expected_output="A text")


def _synthesized(text: str) -> Agent:
    """Return the agent that a model describes by a text."""
    context = SynthesisContext(model=ScriptedModel(text, text))
    return asyncio.run(_awaited(AgentSynthesizer.llm_based().synthesize(_TASK, context)))


async def _awaited(agent: Agent | Awaitable[Agent]) -> Agent:
    return agent if isinstance(agent, Agent) else await agent


def _role_of(text: str) -> object:
    """Return the agent that the template makes of a task's description."""
    task = Task(description=f"Look {text}", expected_output="A text")
    return AgentSynthesizer.template().synthesize(task, SynthesisContext(model=ScriptedModel()))


def _given(tool: AgentTool, *names: str, **fixed: str) -> Callable[[str], object]:
    """Call a tool whose arguments have names; the text stands for each of these."""
    return lambda text: tool.execute(json.dumps({**fixed, **dict.fromkeys(names, text)}))


def _items(read: Callable[[Path], Iterator[object]]) -> Callable[[str], object]:
    """Read a file of items that holds the text."""

    def through_a_file(text: str) -> int:
        path = Path("items")
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return sum(1 for _ in read(path))

    return through_a_file


def _in_pieces(text: str) -> int:
    """Split reasoning from a text that comes character by character."""
    splitter = ReasoningSplitter()
    return sum(len(splitter.feed(piece)) for piece in text)


def _listed(numbers: list[int]) -> int:
    """A function with an argument that may have many mistakes."""
    return len(numbers)


def _inputs(text: str) -> object:
    path = Path("inputs.json")
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return read_inputs([], path)


_NESTED = "[" * 900
_PROMPT = ItemPrompt(Task.of("Read {title}"))
_QUIET = [sys.executable, "-I", "-S", "-c", "pass"]

#: Built-in tools by the name they are exported under; a new one fails a test until it has its line.
TOOLS: Mapping[str, Callable[[Path], Reader]] = {
    "CalculatorTool": lambda _: Reader(CalculatorTool().execute, ("", "1+", "(" * 150)),
    "DateTimeTool": lambda _: Reader(
        DateTimeTool().execute,
        (
            "",
            "a",
            "2024-01-01",
            "2024-01-01 + ",
            "2024-01-01 + 1",
            "convert ",
            "convert a",
            "convert a from ",
            "now in ",
        ),
    ),
    "FileReadTool": lambda place: Reader(_given(FileReadTool(place), "path")),
    "FileWriteTool": lambda place: Reader(_given(FileWriteTool(place), "path", "content")),
    "HumanInputTool": lambda _: Reader(HumanInputTool().execute),
    "HttpAgentTool": lambda _: Reader(HttpAgentTool("api", "d", "http://127.0.0.1:1/").execute),
    "JsonParserTool": lambda _: Reader(JsonParserTool().execute, ("", "a\n", "a\n" + _NESTED, "{", '{"json_path": ')),
    "ProcessAgentTool": lambda _: Reader(ProcessAgentTool("p", "d", _QUIET).execute),
    "WebScraperTool": lambda _: Reader(_given(WebScraperTool(fetcher=lambda url: url), "url")),
    "WebSearchTool": lambda _: Reader(_given(WebSearchTool(lambda query: query), "query")),
}
#: Everything else that reads what a model, a page or a file says.
READERS: Mapping[str, Reader] = {
    "json_parser: path": Reader(_given(JsonParserTool(), "json_path", json='{"a": [1]}'), ("", "a")),
    "json_parser: json": Reader(_given(JsonParserTool(), "json", json_path="a"), ("", _NESTED, '{"a": ')),
    "web_scrape: url": Reader(_given(WebScraperTool(), "url"), ("file:", "http://[", "http:///")),
    "process: answer": Reader(_interpret, ("", "{", '{"output": ')),
    "typed arguments": Reader(lambda text: parse_input(text, FileReadInput), ("", "{", '{"path": ')),
    "arguments": Reader(signature_of(_listed, tool_name="t").read, ("", "{", '{"numbers": '), (ArgumentError,)),
    "delegation": Reader(lambda text: read_call(text, "task", ["a"]), ("", "{", '{"agent_role": ')),
    "answer: reasoning": Reader(
        split_reasoning, ("", "<think>", "</think>", "a</think>", "```a</think>", '["</think>')
    ),
    "answer: reasoning in pieces": Reader(_in_pieces, ("", "<think>"), size=20_000),
    "answer: extract": Reader(extract_json, ("", _NESTED)),
    "answer: list": Reader(lambda text: parse_output(text, list[int]), ("", "[")),
    "answer: mapping": Reader(lambda text: parse_output(text, dict[str, int]), ("", "{")),
    "synthesized agent": Reader(_synthesized, ("", "{", '{"a": ' + _NESTED)),
    "role of a task": Reader(_role_of),
    "template": Reader(lambda text: resolve_template(text, {}), ("", "{", "{a"), (PromptTemplateError,)),
    "template: escaped": Reader(escape_template, ("", "{")),
    "template: of data": Reader(
        lambda text: fill_inputs(f"On {{a}}: {text}", {"a": "x"}, braced_texts(text)), ("", "{", "{a}")
    ),
    "item prompt": Reader(lambda text: _PROMPT.problem({"titel": text, text: 1})),
    "item file: csv": Reader(
        _items(lambda path: csv_rows(CsvFile(path))), ("", "a,b\n", 'a,b\n"', 'a,b\n"x\n"y'), (ValidationError,)
    ),
    "item file: jsonl": Reader(_items(json_lines), ("", "{", _NESTED), (ValidationError,)),
    "inputs file": Reader(_inputs, ("", "{", _NESTED), (ValidationError,)),
    # YAML is read by a program in Python, which takes a second for what nests a thousand deep and refuses it then
    "team file": Reader(lambda text: read_document(text, Problems("f")), size=1_000),
    "reference": Reader(is_reference, ("", "a:")),
    "misspelt name": Reader(lambda text: nearest(text, [text[1:], "known"])),
    "record: fact": Reader(lambda text: text_of({"a": text, text: 1}, lambda _: "digest")),
    "age": Reader(age_from, refuses=(ValidationError,)),
    "demo: passages": Reader(lambda text: list(passages_of("x", text)), size=40_000),
    "demo: sentences": Reader(whole_sentences, ("", "a. ")),
    "terminal line": Reader(lambda text: screen_line(text, 80)),
    "charset name": Reader(codec_of),
}


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a test are its own."""
    monkeypatch.chdir(tmp_path)


def _feed(reader: Reader) -> None:
    """Give it every text, each within its time.

    Raises:
        AssertionError: it took too long, or raised something else than it may.
    """
    for before in reader.before:
        for piece in PIECES:
            text = before + (piece * (reader.size // len(piece) + 1))[: reader.size]
            try:
                with processor_limit(LIMIT_S):
                    reader.read(text)
            except reader.refuses:
                continue
            except (Exception, ProcessorTimeError) as error:  # noqa: BLE001  whatever comes is what is wrong
                what = f"{before[:20]!r} and {piece!r} {reader.size // len(piece)} times"
                pytest.fail(f"{what}: {type(error).__name__}: {str(error)[:200]}", pytrace=False)


@pytest.mark.parametrize("name", TOOLS)
def test_tool_answers_in_linear_time_when_its_argument_repeats_itself(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S-SEC-20, S-SEC-21: with a result or a failure that it wrote, never with an exception that was caught around it."""
    caplog.set_level(logging.WARNING)
    reader = TOOLS[name](tmp_path)
    results: list[object] = []
    _feed(replace(reader, read=lambda text: results.append(reader.read(text))))
    assert len(results) == len(reader.before) * len(PIECES)
    assert all(isinstance(result, ToolResult) for result in results)
    assert [record.getMessage()[:200] for record in caplog.records if "raised" in record.msg] == []


def test_every_built_in_tool_is_fed() -> None:
    """S-SEC-20: a new one needs its line in `TOOLS`."""
    tools = {name for name in builtin_tools.__all__ if issubclass(getattr(builtin_tools, name), AgentTool)}
    assert set(TOOLS) == tools


@pytest.mark.parametrize("name", READERS)
def test_reader_takes_linear_time_when_its_text_repeats_itself(name: str) -> None:
    """S-SEC-20, S-SEC-21."""
    _feed(READERS[name])


@pytest.mark.parametrize("charset", sorted(CHARSETS))
def test_charset_is_decoded_in_linear_time_when_its_bytes_repeat_themselves(charset: str) -> None:
    """S-SEC-13."""
    for piece in (b"a", b"\xff", b"\x81", b"\x1b$B", b"-"):
        with processor_limit(LIMIT_S):
            assert decode((piece * SIZE)[:SIZE], charset)


@pytest.mark.parametrize("brackets", ["[", "{", '{"a":', "(", "[[{"])
def test_tool_fails_plainly_when_its_text_is_nested_beyond_the_stack(brackets: str) -> None:
    """S-SEC-21: 64,000 brackets are a failure that the model can read."""
    deep = brackets * SIZE
    for result in (
        JsonParserTool().execute(f"a\n{deep}"),
        JsonParserTool().execute(json.dumps({"json_path": "a", "json": deep})),
        JsonParserTool().execute(json.dumps({"json_path": "a" + "[0]" * SIZE, "json": '{"a": [1]}'})),
        CalculatorTool().execute(deep),
        CalculatorTool().execute(deep[:9000] + "1" + ")" * 9000),
    ):
        assert not result.is_success
        assert str(result.error_message).startswith(
            ("Invalid JSON", "Invalid expression", "Path not found", "Path expr")
        )
    assert extract_json(deep) is None
    assert _synthesized(deep).role == "Agent"


@pytest.mark.parametrize(
    "expression", ["9^9^9^9", "9" * 9999, "9^" * 4000 + "9", "-" * 9000 + "1", "9.9^" + "9" * 9000]
)
def test_calculator_answers_at_once_when_numbers_are_huge(expression: str) -> None:
    """S-BIT-7: arithmetic is floating point, whatever the number."""
    with processor_limit(LIMIT_S):
        assert CalculatorTool().execute(expression).output in {"Infinity", "1"}


@pytest.mark.parametrize("piece", ["<think>", "</think>", "<think></think>", "<think>a</thinking>", "\n</think>`"])
def test_reasoning_is_split_in_linear_time_when_tags_repeat(piece: str) -> None:
    """S-LLM-1, S-LLM-2: in the whole text, and in a stream of single characters."""
    for before in ("", "a", "<think>", "```"):
        with processor_limit(LIMIT_S):
            split_reasoning(before + piece * SIZE)
        with processor_limit(LIMIT_S):
            _in_pieces(before + piece * (SIZE // 10))


def test_search_for_json_ends_when_each_bracket_costs_a_pass() -> None:
    """S-SEC-22: before, 900 brackets and 200 kB took 3.7 s, and four times the text sixteen times as long."""
    with processor_limit(LIMIT_S):
        assert extract_json("[" * 900 + "1," * 1_000_000) is None
    text = "Notes [draft, 1], {x} and so on: " * 50
    assert extract_json(f'{text}{{"city": "Bern"}} is it.') == '{"city": "Bern"}'


def test_mistakes_are_counted_when_an_answer_has_very_many() -> None:
    """S-SEC-22: a correction prompt names the first twenty; before, it grew to a multiple of the answer."""
    told = str(parse_output(json.dumps(["x"] * 50_000), list[int]).error_message)
    assert told.endswith("; and 49980 more")
    assert len(told) < 5000
