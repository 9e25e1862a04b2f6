"""The commands as a whole: help, version, usage errors, errors of all kinds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ensemble_ray.cli.app import COMMANDS, GROUPS
from tests.command_line import Call


def test_every_command_is_listed_when_help_is_asked_for(call: Call) -> None:
    """`ensemble-ray --help` names all commands, each with a whole sentence."""
    called = call("--help")
    assert called.code == 0
    lines = called.printed.splitlines()
    for name in (*COMMANDS, *GROUPS):
        (line,) = (line for line in lines if line.strip().startswith(f"{name} "))
        assert line.endswith(".")


@pytest.mark.parametrize("command", [*COMMANDS, *GROUPS, "memory ls", "memory clear", "models install", "models list"])
def test_every_command_explains_itself(call: Call, command: str) -> None:
    """`--help` behind each command."""
    called = call(*command.split(), "--help")
    assert called.code == 0
    assert called.printed.startswith(f"Usage: ensemble-ray {command}")


@pytest.mark.program
def test_the_package_runs_as_a_module() -> None:
    """`python -m ensemble_ray` is the command, where no script is on the path."""
    command = [sys.executable, "-m", "ensemble_ray", "version"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)  # noqa: S603  ourselves
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("ensemble-ray ")


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_the_version_is_shown(call: Call, arguments: list[str]) -> None:
    """As the installed package says."""
    assert call(*arguments).printed.startswith("ensemble-ray ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rnu"], "No such command 'rnu'."),
        (["run"], "Missing argument 'TARGET'."),
        (["run", "x.yaml", "--foo"], "No such option: --foo"),
        (["run", "x.yaml", "--runtime", "moon"], "Invalid value for '--runtime'"),
        (["demo", "--chunks", "0"], "Invalid value for '--chunks'"),
    ],
)
def test_usage_is_explained_when_a_command_is_mistyped(call: Call, arguments: list[str], expected: str) -> None:
    """Exit code 2, one message, and where the help is."""
    called = call(*arguments)
    assert called.code == 2
    assert expected in called.said
    assert "--help" in called.said
    assert called.printed == ""


def test_the_help_is_shown_when_there_are_no_arguments(call: Call) -> None:
    """And the exit code says that nothing was done."""
    called = call()
    assert called.code == 2
    assert called.said.startswith("Usage: ensemble-ray")


@pytest.mark.parametrize("position", [0, 2])
def test_a_traceback_is_shown_when_debug_is_asked_for(call: Call, folder: Path, position: int) -> None:
    """Only then; `--debug` may stand anywhere."""
    (folder / "boom_of_test.py").write_text("1 / 0\n", encoding="utf-8")
    arguments = ["plan", "boom_of_test:team"]
    without = call(*arguments)
    assert without.code == 2
    assert "Traceback" not in without.said
    assert "ZeroDivisionError: division by zero" in without.said
    arguments.insert(position, "--debug")
    assert "Traceback" in call(*arguments).said


def test_the_schema_is_printed_as_json(call: Call) -> None:
    """`ensemble-ray schema > file` is what editors are pointed at."""
    assert json.loads(call("schema").printed)["title"] == "ensemble-ray team"


@pytest.mark.program
def test_nothing_heavy_is_imported_when_only_help_is_asked_for() -> None:
    """`--help` stays quick: no Ray, no SDK of a model, no terminal library, no YAML, nothing of teams."""
    code = (
        "import sys\nfrom ensemble_ray.cli.app import invoke\ninvoke(['--help'])\n"
        "heavy = {'ray', 'openai', 'aiohttp', 'yaml', 'rich', 'loky', 'docstring_parser', 'actors', 'pydantic'}\n"
        "sys.exit(sorted(heavy & set(sys.modules)) or 0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603  our own code
    assert ended.returncode == 0, ended.stderr


@pytest.mark.program
def test_commands_that_are_not_called_are_not_imported() -> None:
    """Wherever the options of the program stand."""
    code = (
        "import sys\nfrom ensemble_ray.cli.app import invoke\ninvoke(['--debug', 'schema'])\n"
        "sys.exit(' '.join(name for name in sys.modules if name.startswith('ensemble_ray.cli.commands.')))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603  our own code
    assert ended.stderr.splitlines()[-1] == "ensemble_ray.cli.commands.schema"
