"""An installed wheel, beside a user's own modules with common names."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.architecture.project import ROOT
from tests.processes import own_directory, own_environment, program

pytestmark = pytest.mark.extended

#: Generous: processes start on a machine on which other things run.
_PATIENCE_S = 240.0
_USERS_MODULE = "NAME = 'a module of the user'\n"
_SCRIPT = """
import actors, serve
from ensemble_ray import Agent, Ensemble, Task, tool
from ensemble_ray.testing import ScriptedModel
import ensemble_ray

assert actors.NAME == serve.NAME == "a module of the user"

@tool
def look(text: str) -> str:
    \"\"\"Look it up.\"\"\"
    return f"{text}: {actors.NAME}"

agent = Agent(role="Reader", goal="g", llm=ScriptedModel(otherwise="done"), tools=[look])
for runtime in ("ray", "inline"):  # the one that imports more first
    output = Ensemble(tasks=[Task(description="Read", expected_output="e", agent=agent)]).run(runtime=runtime)
    print(runtime, output.raw, ensemble_ray.__file__)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installation of the wheel brings."""
    built = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(built)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)  # noqa: S603  our own project
    (wheel,) = built.glob("*.whl")
    installed = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(installed)
    return installed


def test_nothing_but_the_package_can_be_imported_from_an_installation(site: Path) -> None:
    """S-CONV-47: one top-level name; the runtime's actors and the endpoint are inside it."""
    names = {path.name for path in site.iterdir() if path.suffix != ".dist-info"}
    assert names == {"ensemble_ray"}
    assert (site / "ensemble_ray" / "actors" / "__init__.py").is_file()
    assert (site / "ensemble_ray" / "serve" / "app.py").is_file()


@pytest.mark.parametrize("is_editable", [False, True], ids=["wheel", "editable"])
def test_a_team_runs_beside_a_users_own_actors_and_serve(site: Path, *, is_editable: bool) -> None:
    """S-CONV-47: in the driver, and in Ray's workers, whose imports begin where the driver's do."""
    with own_directory() as directory:
        for name in ("actors.py", "serve.py"):
            (directory / name).write_text(_USERS_MODULE, encoding="utf-8")
        (directory / "team.py").write_text(_SCRIPT, encoding="utf-8")
        where = str(ROOT if is_editable else site)
        env = own_environment(directory, PYTHONPATH=os.pathsep.join((str(directory), where)), RAY_ADDRESS="local")
        with program(
            [sys.executable, "team.py"], log=directory / "log", env=env, cwd=directory, is_forked=False
        ) as running:
            assert running.process.wait(timeout=_PATIENCE_S) == 0, running.text
            for runtime in ("inline", "ray"):
                assert f"{runtime} done {where}" in running.text
