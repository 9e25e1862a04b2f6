"""Texts that are made to be slow: what reads a model's answer, an argument or a file takes time in proportion to it.

A regular expression holds every thread of the process until it ends. So two things are tested: each reader of foreign text
is fed repeated characters under a limit of processor time (`READERS`: one line each), and so is each pattern in the
code, which is found by reading the code, so that a new one is tested without a line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ensemble_ray import Agent, Task
from ensemble_ray.cli.inputs import read_inputs
from ensemble_ray.loader.item_prompts import ItemPrompt
from ensemble_ray.tools.builtin import (
    CalculatorTool,
    DateTimeTool,
)
from ensemble_ray.tools.tool import AgentTool

ROOT = Path(__file__).resolve().parents[2]
#: Processor time of one text, s: a slow machine needs a tenth of it, what is not linear some minutes.
LIMIT_S = 5.0
SIZE = 200_000
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


def _inputs(text: str) -> object:
    path = Path("inputs.json")
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return read_inputs([], path)


_NESTED = "[" * 900
_PROMPT = ItemPrompt(Task(description="Read {title}", expected_output="x", agent=Agent(role="r", goal="g", llm=None)))
_WRITER = "import sys; sys.stdin.read(); print('{}')"

#: Built-in tools by the name they are exported under; a new one fails a test until it has its line.
TOOLS: Mapping[str, Reader] = {
    "CalculatorTool": Reader(CalculatorTool().execute, ("", "1+", "(" * 150)),
    "DateTimeTool": Reader(
        DateTimeTool().execute,
        ("", "a", "2024-01-01", "2024-01-01 + ", "2024-01-01 + 1", "convert ", "convert a", "now in "),
    ),
}
