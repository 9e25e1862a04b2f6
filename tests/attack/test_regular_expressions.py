"""Each regular expression in the code takes time in proportion to its text; a new one is tested without a line here.

A search holds every thread of the process until it ends, so a pattern that is quadratic is a lever for whoever writes the
text: twenty thousand blanks once stopped a process for half a minute. Patterns are found by reading the code, and are
used here as they are used there: what is only ever matched from the first character on need not be fast to search for.
"""

from __future__ import annotations

import ast
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray.definition.agent import _LABEL_NAME, _LABEL_SELECTOR
from ensemble_ray.prompts.task import _REFLECTION_HEADING
from ensemble_ray.record.journal import _LONG
from ensemble_ray.text.answers import _TAG
from ensemble_ray.text.foreign_text import _CONTROL, _IN_JSON
from ensemble_ray.values.value import _AGE
from tests.attack.processor_time import ProcessorTimeError, processor_limit

ROOT = Path(__file__).resolve().parents[2]
SIZE = 20_000
#: A use over `SIZE` characters may take so many times as long as a quadratic pattern takes over a quarter of them. A quadratic pattern
#: takes 16 times as long, most others a fiftieth of it, on any machine.
MOST_QUARTERS = 5
#: Patterns that are put together while their module is loaded, by the file where that is done and their name there.
BUILT: Mapping[tuple[str, str], re.Pattern[Any]] = {
    ("ensemble_ray/definition/agent.py", "_LABEL_NAME"): _LABEL_NAME,
    ("ensemble_ray/definition/agent.py", "_LABEL_SELECTOR"): _LABEL_SELECTOR,
    # S-EVL-13: any expression of a user, over a limited text.
    ("ensemble_ray/evaluation/scorers.py", "compiled"): re.compile("any"),
    ("ensemble_ray/prompts/task.py", "_REFLECTION_HEADING"): _REFLECTION_HEADING,
    ("ensemble_ray/record/journal.py", "_LONG"): _LONG,
    ("ensemble_ray/text/foreign_text.py", "_CONTROL"): _CONTROL,
    ("ensemble_ray/text/foreign_text.py", "_IN_JSON"): _IN_JSON,
    ("ensemble_ray/text/answers.py", "_TAG"): _TAG,
    ("ensemble_ray/values/value.py", "_AGE"): _AGE,
}
#: How a pattern may be used; whatever else is done with it searches.
ANCHORED = frozenset({"fullmatch", "match"})
_FUNCTIONS = frozenset({"compile", "match", "fullmatch", "search", "sub", "subn", "findall", "finditer", "split"})


@dataclass(frozen=True)
class Used:
    """A pattern, and what is called of it."""

    place: str
    pattern: re.Pattern[Any]
    methods: frozenset[str]

    @property
    def uses(self) -> Iterator[Callable[[Any], object]]:
        """What to do with a text."""
        if self.methods - ANCHORED:
            yield lambda text: deque(self.pattern.finditer(text), maxlen=0)
        for name in self.methods & ANCHORED:
            yield getattr(self.pattern, name)


def _patterns() -> Iterator[Used]:
    """Find each regular expression that the packages use."""
    for package in ("ensemble_ray", "actors", "serve"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if not re.search(r"\bre\.\w", text):  # most files; to parse them all takes seconds
                continue
            nodes = list(ast.walk(ast.parse(text)))
            place = path.relative_to(ROOT).as_posix()
            names = {id(node.value): _names_of(node) for node in nodes if isinstance(node, ast.Assign)}
            for node in nodes:
                match node:
                    case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=name)) if name in _FUNCTIONS:
                        used = _methods_of(nodes, names.get(id(node), ())) if name == "compile" else {name}
                        yield Used(place, _pattern_of(node, place, names.get(id(node), ())), frozenset(used))


def _names_of(assignment: ast.Assign) -> tuple[str, ...]:
    return tuple(target.id for target in assignment.targets if isinstance(target, ast.Name))


def _methods_of(nodes: Sequence[ast.AST], names: tuple[str, ...]) -> set[str]:
    """Say what a module calls of a pattern of that name; `search` where it hands the pattern on, or has no name for it."""
    called = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    methods = {node.attr for node in called if isinstance(node.value, ast.Name) and node.value.id in names}
    owners = {id(node.value) for node in called}
    is_handed_on = any(
        isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load) and id(node) not in owners
        for node in nodes
    )
    return methods if methods and not is_handed_on else methods | {"search"}


def _pattern_of(call: ast.Call, place: str, names: Sequence[str]) -> re.Pattern[Any]:
    try:
        source = ast.literal_eval(call.args[0])
    except ValueError:
        found = [BUILT[place, name] for name in names if (place, name) in BUILT]
        assert found, f"{place}:{call.lineno}: the pattern is no literal; name it in BUILT"
        return found[0]
    named = [*call.args[1:], *(keyword.value for keyword in call.keywords if keyword.arg == "flags")]
    flags = 0
    for part in (part for argument in named for part in ast.walk(argument)):
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "re":
            flags |= getattr(re, part.attr)
    return re.compile(source, flags)


@cache
def _limit_s() -> float:
    """Return the processor time that one use over `SIZE` characters may take on this machine."""
    quadratic, text, spent_s = re.compile(r"\s+x"), " " * (SIZE // 4), list[float]()
    for _ in range(3):
        before = time.thread_time()
        quadratic.search(text)
        spent_s.append(time.thread_time() - before)
    return MOST_QUARTERS * min(spent_s)


def _slow_texts(used: Used) -> list[str]:
    """Return the beginnings of texts that the pattern takes too long for; one is enough."""
    found, limit_s = used.pattern.pattern, _limit_s()
    source = found if isinstance(found, str) else found.decode("latin-1")
    signs = list(dict.fromkeys([" ", "a", "0", "\n", *(sign for sign in source if sign in "\"'{[-./:<`#=@&;,~!*")]))[:9]
    words = [f"{word} " for word in re.findall(r"[A-Za-z]{3,}", source)]
    slow: list[str] = []
    for text in (
        *(before + sign * SIZE for before in ("", *signs, *words) for sign in signs),
        *((one + other) * (SIZE // 2) for one in signs for other in signs if one != other),
    ):
        given = text if isinstance(found, str) else text.encode("latin-1")
        try:
            with processor_limit(limit_s):
                for use in used.uses:
                    use(given)
        except ProcessorTimeError:
            slow.append(text[:20])
        if slow:
            break
    return slow


def test_patterns_are_linear() -> None:
    """S-SEC-20: every pattern in the code."""
    patterns = list(_patterns())
    assert len(patterns) > 40
    assert {f"{used.place}: {used.pattern.pattern!r}": slow for used in patterns if (slow := _slow_texts(used))} == {}


@pytest.mark.parametrize("source", [r"(\S.*?)\s+([+-])\s*([0-9]+)", r"(a+)+b", r"\s+x"])
def test_pattern_is_found_slow_when_it_is(source: str) -> None:
    """S-SEC-20: the check finds quadratic patterns, and worse ones."""
    assert _slow_texts(Used("here", re.compile(source), frozenset({"search", "fullmatch"})))


def test_use_is_known_when_a_pattern_is_matched_or_handed_on() -> None:
    """S-SEC-20: the check takes a pattern for what it is used for."""
    code = "import re\nA = re.compile('a')\nB = re.compile('b')\nA.fullmatch(x)\nB.match(x)\nf(B)\n"
    nodes = list(ast.walk(ast.parse(code)))
    assert _methods_of(nodes, ("A",)) == {"fullmatch"}
    assert _methods_of(nodes, ("B",)) == {"match", "search"}
