"""The documentation runs: code blocks of README.md and docs/ are tests. In: Markdown. Out: one test per block.

- `python`: run in the order of the page, all blocks of a page in one namespace. A visible block of README.md has a namespace of its own: it runs when
  a reader copies it alone.
- `output`: exactly what the Python block before it printed; `...` stands for anything.
- `python original`: the same in another framework: run like `python`, and not checked for types, which are the framework's.
- `python elsewhere`: the original of a framework that is not installed here: it must be Python, and is not run.
- `yaml` whose first line is a comment with a file name: written to the page's working directory.
- `console run`: each `$ ` line is run and its output compared, `ensemble-ray` in this process, but where it dies; plain `console` blocks are only read.

Pages run in an empty directory, on the inline runtime, against a scripted server on loopback that stands for the
endpoint: no key, no network. What a page may not show but should check stands in `invisible-code: python` comments.
The specification is no page to run.
"""

from __future__ import annotations

import contextlib
import doctest
import gc
import io
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from ensemble_ray.llm import local as local_server
from ensemble_ray.testing import ModelServer
from ensemble_ray.testing.model_server import Answer, ServedRequest
from ensemble_ray.values.messages import ToolCall
from tests.command_line import COMMAND, call_command
from tests.template import run_forked

_PRINTED = "__printed__"
#: Tools that the model of the pages uses, and with what.
_USED = {"word_count": '{"text": "The moon pulls the sea."}', "order": '{"item": "tea"}', "look_up": '{"name": "tea"}'}
#: A command that ends its process.
_DYING = "ensemble-ray run shop:team "
_SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_python = PythonEvaluator()


def pytest_configure() -> None:
    """Let Ctrl-C be heard: a shell starts what it runs in the background deaf to it, and tests interrupt things.

    Let this process and the programs of tests keep what they compile. Images of containers set `PYTHONDONTWRITEBYTECODE`,
    and Python sets `sys.dont_write_bytecode` by it before this line: pytest would rewrite the assertions of all tests in
    every session and every worker, which takes twice as long as the rest of the collection. Git ignores `__pycache__`.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Tests make objects by the million: to look for garbage after each 700 of them takes a tenth of the time.
    gc.set_threshold(50_000, 20, 20)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among the modules of thousands of tests, now or later: they are all in use until the session ends."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def _run_python(example: Example) -> None:
    """Run a block and keep what it printed."""
    is_visible = example.document.text.startswith("```", example.start)
    if is_visible and Path(example.path).name == "README.md":
        for name in example.namespace.keys() - {"model_server"}:
            del example.namespace[name]
    printed = io.StringIO()
    example.namespace.setdefault("__name__", "__main__")
    with contextlib.redirect_stdout(printed):
        _python(example)
    example.namespace[_PRINTED] = printed.getvalue()


def _compile_python(example: Example) -> None:
    """Compile a block that nothing here can run."""
    compile(example.parsed, example.path, "exec")


def _compare_output(example: Example) -> None:
    """Compare with what the block before it printed."""
    _assert_same(example.parsed, example.namespace.get(_PRINTED, ""))


def _write_file(example: Example) -> None:
    """Write a block that names a file to the working directory."""
    name = example.parsed.partition("\n")[0].removeprefix("#").strip()
    if Path(name).suffix:
        Path(name).write_text(example.parsed, encoding="utf-8")


def _run_console(example: Example) -> None:
    """Run each command and compare what it printed with the lines below it."""
    for part in f"\n{example.parsed}".split("\n$ ")[1:]:
        line, _, expected = part.partition("\n")
        program, *arguments = shlex.split(line, comments=True)
        is_ours = program == "ensemble-ray"
        if is_ours and not line.startswith(_DYING):
            ended = call_command(Path.cwd(), os.environ, *arguments, is_merged=True)
        else:
            ended = run_forked(
                [*(COMMAND if is_ours else (program,)), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        _assert_same(expected, ended.stdout)


def _assert_same(expected: str, found: str) -> None:
    wanted, got = expected.strip() + "\n", found.strip() + "\n"
    if not doctest.OutputChecker().check_output(wanted, got, _SAME):
        pytest.fail(f"The page says:\n{wanted}\nand it is:\n{got}", pytrace=False)


def _answer(request: ServedRequest) -> Answer:
    """What the model of the pages says: it uses a tool that it knows once, and answers in one sentence."""
    for name, arguments in _USED.items():
        if name in request.tools and not any(message.get("role") == "tool" for message in request.messages):
            return ToolCall(id="call_1", name=name, arguments=arguments)
    return "The moon pulls the sea, and the earth turns beneath it."


@pytest.fixture(scope="module")
def model_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    """The endpoint of a page, and everything else that a page finds around it."""
    here = tmp_path_factory.mktemp("page")
    with ModelServer(_answer) as server, pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setenv("OPENAI_BASE_URL", server.base_url)
        patch.setenv("OPENAI_API_KEY", "sk-of-a-page")
        patch.setenv("ENSEMBLE_RAY_RUNTIME", "inline")
        patch.setenv("ENSEMBLE_RAY_HOME", str(here / "home"))
        patch.setenv("COLUMNS", "100")
        patch.setenv("NO_COLOR", "1")
        patch.delenv("ENSEMBLE_RAY_CAPTURE_MODE", raising=False)
        patch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        yield server
        local_server.release_all()  # that of a page with the embedded model


pytest_collect_file = Sybil(
    name="pages",
    parsers=[
        CodeBlockParser("python", _run_python),
        CodeBlockParser("python original", _run_python),
        CodeBlockParser("python elsewhere", _compile_python),
        CodeBlockParser("output", _compare_output),
        CodeBlockParser("yaml", _write_file),
        CodeBlockParser("console run", _run_console),
        SkipParser(),
    ],
    patterns=["README.md", "docs/*.md", "docs/decisions/*.md"],
    fixtures=["model_server"],
).pytest()
