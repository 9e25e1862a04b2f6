"""Team files that want to be programs: whatever they name, `plan` and `run` refuse it before anything of it is called."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ensemble_ray.cli.app import invoke
from tests.processes import own_environment

#: The user's module. It uses programs, as modules do; none of that is meant for a team file.
SHOP = '''
import functools
import operator
import os
import pathlib
import subprocess
import vendor
from os import system
from subprocess import Popen

from ensemble_ray import tool

touch = functools.partial(subprocess.run, ["touch", "marker"])
mkdir = operator.methodcaller("mkdir")
spot = pathlib.Path("marker")
mark = spot.touch
borrowed = vendor.make
Popens = list[Popen]
Makers = vendor.Maker | None

class RefCountedCache:
    runner = subprocess
    Popen = subprocess.Popen

@tool
def order(path: str) -> str:
    """Order it."""
    pathlib.Path(path).touch()
    return "ordered"
'''

#: A package of somebody else, installed. All that it has acts when it is called or made.
VENDOR = """
import pathlib

def make(path="marker", *args, **more):
    pathlib.Path(path).touch()

class Maker:
    def __init__(self, path="marker"):
        pathlib.Path(path).touch()

    def resolve(self):
        return []

    def __call__(self, *args):
        pathlib.Path("marker").touch()

"""

FILE = "llm: local\nagents: {{a: {{goal: g}}}}\ntasks: {{t: {{description: d{task}}}}}\n{team}"


def with_tool(entry: str) -> str:
    """A team whose task has a tool."""
    return FILE.format(task=f", tools: [{entry}]", team="")


def with_key(key: str, value: str) -> str:
    """A team whose task has a key."""
    return FILE.format(task=f", {key}: {value}", team="")


def with_rule(key: str, value: str) -> str:
    """A team with a key."""
    return FILE.format(task="", team=f"{key}: {value}\n")


HOSTILE = [
    # A program, a file, code: made of the file's own arguments.
    with_tool("{subprocess:Popen: {args: [touch, marker]}}"),
    with_tool("{subprocess:getoutput: {cmd: touch marker}}"),
    with_tool("{os:system: {command: touch marker}}"),
    with_tool("{os:mkdir: {path: marker}}"),
    with_tool("{posix:mkdir: {path: marker}}"),
    with_tool("{builtins:open: {file: marker, mode: w}}"),
    with_tool("{builtins:eval: {source: '1'}}"),
    with_tool("{io:open: {file: marker, mode: w}}"),
    with_tool("{pickle:loads: {data: x}}"),
    with_tool("{importlib:import_module: {name: planted}}"),
    with_tool("{runpy:run_path: {path_name: planted.py}}"),
    with_tool("{shutil:copyfile: {src: team.yaml, dst: marker}}"),
    with_tool("{logging:FileHandler: {filename: marker}}"),
    with_tool("{zipfile:ZipFile: {file: marker, mode: w}}"),
    with_tool("{sqlite3:connect: {database: marker}}"),
    with_tool("{functools:partial: {func: x}}"),
    with_tool("{operator:methodcaller: {name: x}}"),
    with_tool("{pathlib:Path: {}}"),
    with_tool("'subprocess:Popen'"),
    with_tool("'antigravity:webbrowser.open'"),
    # Of an installed package what is not made for teams, with and without arguments.
    with_tool("{vendor:make: {path: marker}}"),
    with_tool("{vendor:Maker: {path: marker}}"),
    with_tool("'vendor:Maker'"),
    with_tool("'vendor:pathlib.Path'"),
    with_tool("{ensemble_ray.teamfile:load_ensemble: {target: 'planted:team'}}"),
    # Through the user's own module, which only imports or holds it.
    with_tool("{shop:Popen: {args: [touch, marker]}}"),
    with_tool("{shop:subprocess.Popen: {args: [touch, marker]}}"),
    with_tool("{shop:os.mkdir: {path: marker}}"),
    with_tool("{shop:system: {command: touch marker}}"),
    with_tool("{shop:RefCountedCache.Popen: {args: [touch, marker]}}"),
    with_tool("{shop:RefCountedCache.runner.Popen: {args: [touch, marker]}}"),
    with_tool("{shop:touch: {}}"),
    with_tool("{shop:mark: {}}"),
    with_tool("{shop:spot.touch: {}}"),
    with_tool("{shop:borrowed: {path: marker}}"),
    with_tool("{shop:__builtins__.open: {file: marker, mode: w}}"),
    with_tool("{shop:order.__globals__: {}}"),
    # A tool is called by models, and not while the file is read.
    with_tool("{shop:order: {path: marker}}"),
    # At the other places where a file names code.
    with_key("handler", "os:getcwd"),
    with_key("handler", "vendor:Maker"),
    with_key("handler", "vendor:make"),
    with_key("input_guardrails", "['vendor:make']"),
    with_key("input_guardrails", "['builtins:eval']"),
    with_key("output_guardrails", "['shop:mkdir']"),
    with_key("output_type", "subprocess:Popen"),
    with_key("output_type", "shop:Popen"),
    with_key("output_type", "shop:Popens"),
    with_key("output_type", "shop:Makers"),
    with_key("output_type", "vendor:Maker"),
    with_rule("listeners", "['vendor:Maker']"),
    with_rule("on_task_start", "vendor:make"),
    with_rule("on_token", "builtins:print"),
    with_rule("agent_synthesizer", "vendor:Maker"),
    with_rule("trace_exporter", "vendor:Maker"),
    with_rule("trace_exporter", "shop:touch"),
    with_rule("tool_metrics", "vendor:Maker"),
    with_rule("delegation_policies", "['vendor:Maker']"),
    with_rule("manager_prompt_strategy", "vendor:Maker"),
    "llm: local\nmap_reduce: {items: [1], map: {description: d}, token_estimator: 'vendor:make'}\n",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with the user's module and beside it a folder of installed packages."""
    installed = tmp_path / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "vendor.py").write_text(VENDOR, encoding="utf-8")
    here = tmp_path / "here"
    here.mkdir()
    (here / "shop.py").write_text(SHOP, encoding="utf-8")
    (here / "planted.py").write_text("open('marker', 'w')\n", encoding="utf-8")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("ENSEMBLE_RAY_RUNTIME", "inline")
    yield here
    for name in ("shop", "planted", "vendor"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("text", HOSTILE)
def test_code_that_is_not_meant_for_teams_is_refused_before_it_is_called(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """S-SEC-70 to S-SEC-74: `plan` and `run` end with 2 and the place in the file, and nothing was done."""
    (folder / "team.yaml").write_text(text, encoding="utf-8")
    before = sorted(os.listdir(folder))  # noqa: PTH208  names alone
    for command in ("plan", "run"):
        assert invoke((command, "team.yaml")) == 2
        printed, said = capsys.readouterr()
        assert said.startswith("Error: team.yaml:"), said
        assert not printed
    assert sorted(each for each in os.listdir(folder) if each != "__pycache__") == before  # noqa: PTH208
    assert "antigravity" not in sys.modules


def test_what_to_do_is_said_when_code_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """S-SEC-70: what it is, and that a function of one's own may call it."""
    (folder / "team.yaml").write_text(HOSTILE[0], encoding="utf-8")
    assert invoke(("plan", "team.yaml")) == 2
    said = capsys.readouterr().err
    assert "team.yaml:3:" in said
    assert "'subprocess:Popen' cannot be named in a team file: it belongs to the standard library" in said
    assert "What to do: write" in said
    assert "in a module of your own" in said


def test_a_module_beside_a_file_is_no_library_when_the_file_names_no_code(folder: Path) -> None:
    """S-SEC-75: a file that only names a model does not run `openai.py` of the folder that it came in."""
    model = "{model: m, base_url: 'http://127.0.0.1:9/v1', max_retries: 0}"
    text = f"llm: {model}\nretry:\ntasks: {{t: {{description: d, tools: [web_scrape, calculator]}}}}\n"
    (folder / "team.yaml").write_text(text, encoding="utf-8")
    for library in ("openai", "aiohttp", "httpx2", "httpx", "anyio", "email", "netrc", "shlex"):
        (folder / f"{library}.py").write_text("open('marker', 'w')\nraise SystemExit(9)\n", encoding="utf-8")
    env = own_environment(folder, ENSEMBLE_RAY_RUNTIME="inline", OPENAI_API_KEY="k")
    command = [sys.executable, "-P", "-m", "ensemble_ray.cli", "run", "team.yaml"]
    done = subprocess.run(  # noqa: S603  a command of ours
        command, env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 1, done.stderr
    assert "127.0.0.1:9" in done.stderr  # it came as far as the model, whose endpoint is not there
    assert not (folder / "marker").exists()


def _bombs() -> dict[str, str]:
    """Texts that are small and mean much, or that a reader stumbles over."""
    rest = "llm: local\ntasks: {t: {description: d}}\n"
    aliases = "".join(f"x{n}: &x{n} [{', '.join(f'*x{n - 1}' for _ in range(10))}]\n" for n in range(1, 30))
    return {
        "aliases": f"x0: &x0 [1]\n{aliases}{rest}",
        "merges": f"x: &x {{{','.join(f'k{n}: 1' for n in range(20_000))}}}\ny:\n  <<: [*x{',*x' * 9_000}]\n{rest}",
        "depth": f"a: {'[' * 20_000}",
        "depth of blocks": "- " * 20_000,
        "keys": f"{rest}{''.join(f'k{n}: 1' + chr(10) for n in range(40_000))}",
        "misspelt keys": f"{rest}{''.join(f'workflo{n}: 1' + chr(10) for n in range(8_000))}",
        "one key": f"{rest}{'k' * 900_000}: 1\n",
        "numbers to the base 60": f"{rest}verbose: {'1:' * 400_000}1\n",
        "fractions to the base 60": f"{rest}max_cost: {'1:' * 400_000}1.0\n",
        "digits": f"{rest}max_tokens: {'9' * 900_000}\n",
        "endless": f"{rest}delegation_timeout: .inf\n",
        "no number": f"{rest}max_cost: .nan\n",
        "far too long a time": f"{rest}delegation_timeout: 1e300\n",
        "half a character": f'{rest}inputs: {{a: "\\ud800"}}\n',
        "a home of nobody": "llm: 'local:~no-such-user/x.gguf'\ntasks: {t: {description: d}}\n",
        "no path": 'llm: local\nmap_reduce: {items: [1], map: {description: d}, results: "a\\0.jsonl"}\n',
        "length": rest + "# " + "x" * 3_000_000,
        "modules": f"llm: local\ntasks: {{t: {{description: d, tools: [{','.join(f'no{n}:x' for n in range(8_000))}]}}}}\n",
        "tags": "llm: !!python/object/apply:os.system ['touch marker']\ntasks: {t: {description: d}}\n",
    }


@pytest.mark.parametrize("name", list(_bombs()))
def test_file_is_refused_in_little_time_when_it_means_much(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """S-SEC-76: each ends with 2, one error with a place, and within a few seconds of processor time and 300 MB."""
    (folder / "team.yaml").write_text(_bombs()[name], encoding="utf-8")
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used = resource.getrusage(resource.RUSAGE_SELF)
    assert invoke(("plan", "team.yaml")) == 2
    now = resource.getrusage(resource.RUSAGE_SELF)
    said = capsys.readouterr().err
    assert "team.yaml" in said
    assert "Traceback" not in said
    assert len(said) < 1_000_000
    assert now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime < 15
    assert now.ru_maxrss - peak_before < 300_000
    assert not (folder / "marker").exists()


@pytest.mark.parametrize("place", ["os:getcwd", "subprocess:getoutput", "builtins:print"])
def test_recorded_team_is_not_loaded_when_the_record_names_the_interpreters_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """S-SEC-77: `resume` and `fork` load a team from where its record says that it stands."""
    from ensemble_ray import ValidationError
    from ensemble_ray.definition.fields import Origin
    from ensemble_ray.teamfile import load_runnable, load_source

    with pytest.raises(ValidationError, match="standard library"):
        load_source(Origin(place=place, overrides={"cmd": "touch marker"}))
    with pytest.raises(ValidationError, match="neither an Ensemble nor a function that makes one"):
        load_runnable(place)
    with pytest.raises(ValidationError, match="takes no arguments from a record"):
        load_source(Origin(place="vendor:make", overrides={"path": "marker"}))
    assert not (folder / "marker").exists()
