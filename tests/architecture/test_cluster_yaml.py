"""The cluster launcher's files: valid for Ray, and every node gets this package, a token, and no open door."""

from __future__ import annotations

import fnmatch
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("head", "worker")
FILES = ("cluster.yaml", "deploy/cluster-aws.yaml")


@pytest.fixture(scope="module", params=FILES)
def cluster(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A file as `ray up` sees it: with Ray's defaults, and the common commands in front of each kind's own."""
    from ray.autoscaler._private.util import prepare_config

    loaded = yaml.safe_load((ROOT / request.param).read_text(encoding="utf-8"))
    prepared: dict[str, Any] = prepare_config(loaded)
    return prepared


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """What pyproject.toml says of the project."""
    described: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return described


def start_of(cluster: dict[str, Any], kind: str) -> str:
    """The command that starts Ray on a kind of node."""
    (command,) = [each for each in cluster[f"{kind}_start_ray_commands"] if "ray start" in each]
    return str(command)


def test_the_file_is_valid_by_rays_own_schema(cluster: dict[str, Any]) -> None:
    """By the same function that `ray up` calls."""
    from ray.autoscaler._private.util import validate_config

    validate_config(cluster)


@pytest.mark.parametrize("kind", KINDS)
def test_every_node_installs_the_wheel_of_this_project(
    cluster: dict[str, Any], project: dict[str, Any], kind: str
) -> None:
    """With the extra for endpoints, from the directory that is sent along, and from no index that the file names."""
    wheel = f"~/ensemble-ray/dist/{project['name'].replace('-', '_')}-{project['version']}-py3-none-any.whl"
    installs = [each for each in cluster[f"{kind}_setup_commands"] if "pip install" in each]
    patterns = re.findall(r"~/\S*ensemble_ray\S*\.whl", " ".join(installs))
    assert patterns
    assert all(fnmatch.fnmatch(wheel, pattern) for pattern in patterns)
    extras = re.findall(r"\.whl\)\[([a-z,]+)\]", installs[0])[0].split(",")
    assert "serve" in extras
    assert set(extras) <= project["optional-dependencies"].keys()
    assert cluster["file_mounts"]["~/ensemble-ray/dist"] == "dist"
    assert not [each for each in installs if "://" in each or "index" in each]


@pytest.mark.parametrize("kind", KINDS)
def test_ray_is_pinned_to_a_version_that_the_package_takes(
    cluster: dict[str, Any], project: dict[str, Any], kind: str
) -> None:
    """Nodes that are set up at different times would else get different ones, and refuse each other."""
    (pin,) = {
        word for each in cluster[f"{kind}_setup_commands"] for word in shlex.split(each) if word.startswith("ray==")
    }
    needed = next(Requirement(each) for each in project["dependencies"] if Requirement(each).name == "ray")
    assert needed.specifier.contains(pin.removeprefix("ray=="))


@pytest.mark.parametrize("kind", KINDS)
def test_ray_is_started_with_what_jobs_need(cluster: dict[str, Any], kind: str) -> None:
    """The `python` of jobs is the one on this PATH; a token opens the cluster; nothing is reported to anybody."""
    before, _, _ = start_of(cluster, kind).partition("ray start")
    settings = {name: value for name, eq, value in (word.partition("=") for word in shlex.split(before)) if eq}
    assert settings["PATH"].startswith("$HOME/ensemble-ray/venv/bin:")
    assert settings["RAY_AUTH_MODE"].rstrip(";") == "token"
    assert settings["RAY_USAGE_STATS_ENABLED"].rstrip(";") == "0"
    assert "~/.ray/auth_token" in cluster["file_mounts"]
    assert "set -a;" in before


@pytest.mark.parametrize("kind", KINDS)
def test_ray_takes_the_options_it_is_started_with(cluster: dict[str, Any], kind: str) -> None:
    """By its own command line; the dashboard listens on loopback alone."""
    from ray.scripts.scripts import start

    arguments = shlex.split(start_of(cluster, kind).partition("ray start")[2])
    options = start.make_context("ray start", arguments).params
    assert options["head"] is (kind == "head")
    assert options["dashboard_host"] == "127.0.0.1" or kind == "worker"
    assert "0.0.0.0" not in " ".join(arguments)  # noqa: S104  it must not be there


def test_every_command_is_one_that_a_shell_can_read(cluster: dict[str, Any]) -> None:
    """A node's shell is bash."""
    commands = [
        each for kind in KINDS for part in ("setup", "start_ray") for each in cluster[f"{kind}_{part}_commands"]
    ]
    assert commands
    for command in commands:
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)  # noqa: S603, S607  only read, not carried out
        assert not done.stderr, command


@pytest.mark.parametrize("file", ["cluster.yaml", "deploy/serve.yaml", "docs/serving.md", "docs/durability.md"])
def test_all_files_say_that_records_lie_on_the_head(file: str) -> None:
    """Other nodes send theirs there, so that no file may ask for a directory that nodes share."""
    text = " ".join((ROOT / file).read_text(encoding="utf-8").replace("#", " ").split())
    told = re.findall(r"[^.;]*\b(?:records|path)\b[^.;]* (?:the|its) head[^.;]*", text, flags=re.IGNORECASE)
    assert told, f"{file} does not say where records lie"
    assert not re.search(r"(?:directory|path) that (?:all )?nodes share|all nodes share that directory", text)
