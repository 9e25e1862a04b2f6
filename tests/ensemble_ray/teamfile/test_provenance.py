"""What a team file may name: the user's own code, and of installed packages what is made for teams."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ensemble_ray import ValidationError
from ensemble_ray.teamfile.references import Expected, Provenance, definer_of, find_permitted, module_provenance
from tests.ensemble_ray.teamfile.conftest import Load, Refused

OWN = '''
import functools
import subprocess
from collections.abc import Callable, Sequence
from datetime import date
from typing import Annotated, Literal, NewType
from typing_extensions import TypeAliasType
from pydantic import BaseModel, Field
from ensemble_ray import tool
from parts.inner import imported
import vendored

def guard(value, most=0): ...

limited = functools.partial(guard, most=5)

@functools.lru_cache
def cached(value): ...

def decorated(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)
    return inner

@decorated
def wrapped(value): ...

class Checker:
    def check(self, value): ...

    class Nested:
        @staticmethod
        def check(value): ...

checker = Checker()
theirs = vendored.VendorTool()
watcher = vendored.Watcher()

class Stock:
    @tool
    def count(self, item: str) -> int:
        """Count."""
        return 1

stock = Stock()

class Line:
    pass

Lines = list[Line]
Choice = Literal["a", "b"]
Answers = dict[str, vendored.Answer] | None
Days = Sequence[date]

class Answer(BaseModel):
    value: int

Size = Annotated[int, Field(gt=5)]
Page = NewType("Page", Line)
Pages = TypeAliasType("Pages", list[Page])
Sizes = dict[str, Size] | None
Maker = Callable[[int], str]
Sep = NewType("Sep", subprocess.Popen)
Seps = Annotated[list[subprocess.Popen], "s"]
'''
VENDORED = '''
from pydantic import BaseModel
from ensemble_ray import AgentTool, EnsembleListener, ToolResult, tool

class VendorTool(AgentTool):
    name = "vendor"
    description = "d"

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def execute(self, text):
        return ToolResult.success(text)

@tool
def vendor_tool(text: str) -> str:
    """Say it."""
    return text

class Watcher(EnsembleListener): ...

class Shaped:
    def on_task_start(self, event): ...

class Policy:
    def evaluate(self, request, context): ...

class Answer(BaseModel):
    value: int
'''
TEAM = """
llm: local
listeners: [{listener}]
on_task_complete: {guard}
delegation_policies: [{policy}]
tasks:
  t: {{description: d, output_type: "{kind}", output_guardrails: ["{guard}"], tools: [{tool}]}}
"""
_DEFAULTS = {
    "listener": "vendored:Watcher",
    "guard": "own_code:guard",
    "policy": "vendored:Policy",
    "kind": "own_code:Answer",
    "tool": "vendored:vendor_tool",
}


@pytest.fixture(autouse=True)
def modules(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The user's modules in the current directory, and a package that is installed elsewhere."""
    (folder / "own_code.py").write_text(OWN, encoding="utf-8")
    (folder / "parts").mkdir()
    (folder / "parts" / "__init__.py").write_text("from parts.inner import imported\n", encoding="utf-8")
    (folder / "parts" / "inner.py").write_text("def imported(value): ...\n", encoding="utf-8")
    installed = tmp_path_factory.mktemp("lib") / "site-packages"
    installed.mkdir()
    (installed / "vendored.py").write_text(VENDORED, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    monkeypatch.delitem(sys.modules, "vendored", raising=False)


@pytest.mark.parametrize(
    ("place", "named"),
    [
        *(("guard", f"own_code:{name}") for name in ("limited", "cached", "wrapped", "checker.check")),
        *(("guard", name) for name in ("own_code:Checker.Nested.check", "own_code:imported", "parts:imported")),
        *(("listener", name) for name in ("vendored:Shaped", "own_code:watcher")),
        *(("tool", name) for name in ("own_code:Stock", "own_code:stock", "own_code:stock.count", "own_code:theirs")),
        *(("tool", name) for name in ("vendored:VendorTool", "{vendored:VendorTool: {size: 2}}")),
        *(("tool", name) for name in ("ensemble_ray:CalculatorTool", "ensemble_ray.tools:DateTimeTool")),
        *(("kind", name) for name in ("vendored:Answer", "builtins:str", "datetime:date", "decimal:Decimal")),
        *(
            ("kind", f"own_code:{name}")
            for name in ("Lines", "Choice", "Answers", "Days", "Size", "Page", "Pages", "Sizes", "Maker")
        ),
        *(("kind", name) for name in ("str", "int", "float", "bool", "list", "dict")),
    ],
)
def test_code_that_is_meant_for_teams_is_taken(load: Load, place: str, named: str) -> None:
    """S-SEC-71, S-SEC-72: own functions, classes, objects and what wraps them; tools, listeners and models of packages."""
    team = load(TEAM.format(**{**_DEFAULTS, place: named}))
    assert len(team.tasks[0].tools) == 1
    assert (len(team.listeners), len(team.on_task_complete)) == (1, 1)


@pytest.mark.parametrize(
    ("place", "named", "expected"),
    [
        ("guard", "vendored:vendor_tool", "it is a function of an installed package (vendored)"),
        ("guard", "os.path:join", "it belongs to the standard library"),
        ("guard", "own_code:functools.partial", "it is a module of the standard library (functools)"),
        ("guard", "own_code:_private", "begins with '_'"),
        ("guard", "own_code:vendored.Policy", "it is a class of an installed package (vendored)"),
        ("listener", "os:sep", "'os:sep' is a str, and not a listener"),
        ("listener", "vendored:Policy", "it is a class of an installed package (vendored), and not a listener"),
        ("tool", "{own_code:stock.count: {item: tea}}", "is a tool already"),
        ("kind", "pathlib:Path", "it belongs to the standard library"),
        ("kind", "__main__:Answer", "begins with '_'"),
        ("kind", "own_code:Sep", "of the standard library"),
        ("kind", "own_code:Seps", "of the standard library"),
    ],
)
def test_reason_is_told_when_code_is_refused(refused: Refused, place: str, named: str, expected: str) -> None:
    """S-SEC-70: what it is, and where it comes from."""
    message = "\n".join(refused(TEAM.format(**{**_DEFAULTS, place: named})))
    assert expected in message


def test_type_is_refused_when_it_cannot_be_hashed(refused: Refused, folder: Path) -> None:
    """S-DOM-27, S-SEC-72: with a message of the file."""
    (folder / "own_code.py").write_text(OWN + "\nListed = Annotated[int, [1]]\n", encoding="utf-8")
    message = "\n".join(refused(TEAM.format(**{**_DEFAULTS, "kind": "own_code:Listed"})))
    assert "Task output_type must be hashable" in message


def test_modules_of_the_file_s_folder_are_own_also_among_installed_packages(folder: Path) -> None:
    """S-SEC-71: a package may bring team files with code beside them; an environment below the folder stays installed."""
    installed = folder / "site-packages" / "teams"
    installed.mkdir(parents=True)
    (installed / "beside_of_test.py").write_text("def guard(value): ...\n", encoding="utf-8")
    sys.path.append(str(installed))
    expected = Expected(what="a callable")
    assert callable(find_permitted("beside_of_test:guard", expected, (installed.resolve(),)))
    with pytest.raises(ValidationError, match="of an installed package"):
        find_permitted("beside_of_test:guard", expected, (folder.resolve(),))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("os", Provenance.STANDARD),
        ("sys", Provenance.STANDARD),
        ("antigravity", Provenance.STANDARD),
        ("importlib.util", Provenance.STANDARD),
        ("_socket", Provenance.STANDARD),
        ("pydantic", Provenance.INSTALLED),
        ("yaml.loader", Provenance.INSTALLED),
        ("ensemble_ray.tools", Provenance.INSTALLED),
        ("tests.ensemble_ray", Provenance.OWN),
        ("own_code", Provenance.OWN),
        ("no_such_module_at_all", None),
    ],
)
def test_modules_are_told_apart_without_an_import(folder: Path, name: str, expected: Provenance | None) -> None:
    """S-SEC-70: by the place of their file."""
    sys.path.insert(0, str(folder))
    assert module_provenance(name) is expected
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    ("found", "module"),
    [(os.system, "posix"), (os, "os"), ([].append, ""), (Path("x"), "pathlib"), (Load, "collections.abc")],
)
def test_definer_is_where_a_thing_was_made_when_it_was_imported(found: object, module: str) -> None:
    """S-SEC-71: a module does not own what it imports."""
    assert definer_of(found) == module
