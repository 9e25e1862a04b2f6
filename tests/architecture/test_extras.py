"""What is optional: everything can be imported without it, and what needs it says what installs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from ensemble_ray import (
    EnsembleDevTools,
    IllegalStateError,
    LocalEmbeddingModel,
    MapEnsemble,
    ProcessControl,
    Task,
    ToolConfigurationError,
    ValidationError,
    WebDashboard,
    WebScraperTool,
)
from ensemble_ray.definition.ensemble import EnsembleDefinition
from tests.command_line import ROOT

EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
]
#: Modules that extras bring, and nothing else that the library needs.
OPTIONAL = (
    "fastapi", "uvicorn", "starlette", "websockets", "sse_starlette", "graphlay", "xllamacpp", "selectolax", "psycopg",
    "pyarrow", "pandas", "numpy", "wordllama", "mcp", "mcp_types", "opentelemetry", "a2a",
)  # fmt: skip
IMPORT_ALL = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))
from ensemble_ray import *
assert ProcessControl and WebDashboard and RayRuntime
"""


def test_all_is_every_extra_and_serve_has_studio() -> None:
    """S-SET-60: but those that only developers of the library need."""
    (everything,) = EXTRAS["all"]
    named = set(everything.partition("[")[2].rstrip("]").split(","))
    assert named | {"all", "studio", "docs", "dev"} == set(EXTRAS)
    assert "ensemble-ray[studio]" in EXTRAS["serve"]
    assert EXTRAS["dev"][0] == "ensemble-ray[all,docs]"


@pytest.mark.program
def test_every_name_can_be_imported_without_any_extra(tmp_path: Path) -> None:
    """S-SET-59: `from ensemble_ray import *` in a new process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", IMPORT_ALL, *OPTIONAL]
    done = subprocess.run(  # noqa: S603  our own program
        command, check=False, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")


def draw() -> object:
    """Draw a team as a picture."""
    return EnsembleDevTools.draw(EnsembleDefinition(tasks=[Task.of("Say it")]), "picture.svg")


@pytest.mark.parametrize(
    ("extra", "module", "use"),
    [
        ("memory", "wordllama", LocalEmbeddingModel),
        ("web", "selectolax", WebScraperTool),
        ("parquet", "pyarrow.parquet", lambda: MapEnsemble(items=["a"], map_task=Task.of, results="x.parquet").run()),
        ("studio", "fastapi", ProcessControl),
        ("studio", "sse_starlette", lambda: WebDashboard.on_port(0).start()),
        ("studio", "graphlay", lambda: WebDashboard.on_port(0).start()),
        ("studio", "graphlay", draw),
    ],
)
def test_what_needs_an_extra_says_what_installs_it(
    extra: str, module: str, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """S-SET-59: when it is used."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        (ValidationError, ToolConfigurationError, IllegalStateError),
        match=re.escape(f"ensemble-ray[{extra}]"),
    ):
        use()
