"""Fixtures of all tests: a home of its own for every test, one shared cluster, one runtime object per kind."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ensemble_ray import InlineRuntime
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.testing import ModelServer, ScriptedModel

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

    from ensemble_ray import RayRuntime, Runtime
    from tests.postgres_server import PostgresServer

#: Both runtimes; a scenario that takes `runtime` runs on each of them.
RUNTIMES = ("inline", "ray")
_ROOT = Path(__file__).resolve().parents[1]
#: Place of the folders whose tests take longest, in the order in which they run; then come all others.
_ORDER = {
    f"tests/{name}": place
    for place, name in enumerate(("chaos", "browser", "serve", "scenarios", "attack", "actors", "studio"))
}
#: What a module imports whose tests fork the process that they run in.
_FORKS = {"Child", "call_in_child"}
#: Where each test says itself that it starts a program.
_CORE = "tests/ensemble_ray/"
#: What a module imports whose tests start programs.
_PROGRAMS = {"subprocess", "program", "own_environment", "run_command", "run_example", "run_forked", "ForkedProgram"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Distribute whole files to the workers, in their order, and the browser's as one: its tests share what is recorded."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return file if not file.startswith("tests/browser/") else "tests/browser"

    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run first what takes long, so that no worker is left with it in the end; mark what starts processes.

    A test that needs the cluster is known by its fixtures; outside the core one that starts programs, by its module's imports.
    """
    items.sort(key=_place)
    for item in (each for each in items if isinstance(each, pytest.Function)):
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        chosen = {each for each in values if isinstance(each, str)}
        if "ray_cluster" in item.fixturenames or "ray" in chosen:
            item.add_marker("cluster")
        if item.nodeid.startswith(_CORE):
            continue
        if "postgres" in {*item.fixturenames, *chosen} or _PROGRAMS & vars(item.module).keys():
            item.add_marker("program")


def _place(item: pytest.Item) -> int:
    """Where a test runs: those that fork this process come before any that connects it to Ray, whose threads no child survives."""
    if isinstance(item, pytest.Function) and _FORKS & vars(item.module).keys():
        return -1
    return _ORDER.get("/".join(item.nodeid.split("/", 2)[:2]), len(_ORDER))


@pytest.fixture(scope="session")
def make_home(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    """Makes directories by number; `mktemp` looks through all there are for the next free one, of thousands."""
    homes, numbers = tmp_path_factory.mktemp("homes"), itertools.count()

    def make() -> str:
        path = homes / str(next(numbers))
        path.mkdir()
        return str(path)

    return make


@pytest.fixture(autouse=True)
def home(make_home: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Records of a test's runs go to a directory of its own; what the environment says of runs is not heard."""
    path = make_home()
    monkeypatch.setenv("ENSEMBLE_RAY_HOME", path)
    for name in (
        "ENSEMBLE_RAY_RUNTIME", "ENSEMBLE_RAY_STORE", "ENSEMBLE_RAY_CAPTURE_MODE", "ENSEMBLE_RAY_OTEL", "RAY_ADDRESS",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    return path


@pytest.fixture(autouse=True)
def checkout() -> Iterator[None]:
    """Fail the test that leaves something at the top of the checkout; the caches of tools are no news."""
    before = _names_in_root()
    yield
    left = [name for name in _names_in_root() - before if not name.startswith((".", "__pycache__"))]
    assert left == [], "a test writes to its own tmp_path"


def _names_in_root() -> set[str]:
    with os.scandir(_ROOT) as found:
        return {each.name for each in found}


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """What a test does to logging (`--debug` sets levels and a handler) ends with it."""
    root, ours = logging.getLogger(), logging.getLogger("ensemble_ray")
    levels, handlers = {root: root.level, ours: ours.level}, list(root.handlers)
    yield
    for logger, level in levels.items():
        if logger.level != level:  # setting one empties a cache of every logger there is
            logger.setLevel(level)
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)


@pytest.fixture(scope="session")
def cluster_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is home to the shared cluster's own processes, as its scheduler."""
    return tmp_path_factory.mktemp("cluster home")


@pytest.fixture(scope="session")
def ray_cluster(cluster_home: Path) -> Iterator[str]:
    """One local cluster for all tests of a session, started as the runtime starts one; gives its address."""
    import ray  # only tests that ask for the cluster pay for it

    from ensemble_ray.actors.driver.cluster import LOCAL, join_or_start

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENSEMBLE_RAY_HOME", str(cluster_home))
        join_or_start(LOCAL, {"num_cpus": 2})
    yield str(ray.get_runtime_context().gcs_address)
    ray.shutdown()


@pytest.fixture(scope="session")
def ray_runtime(ray_cluster: str) -> Iterator[RayRuntime]:
    """One runtime on the shared cluster; its processes stay warm from test to test."""
    from ensemble_ray import RayRuntime

    with RayRuntime() as runtime:
        yield runtime


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One database server for all tests of a session."""
    from tests.postgres_server import PostgresServer  # only tests that ask for it pay for it

    server = PostgresServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def inline_runtime() -> Iterator[InlineRuntime]:
    """One runtime of this process."""
    runtime = InlineRuntime()
    yield runtime
    run_blocking(runtime.close())


@pytest.fixture(scope="module")
def forked_servers() -> Iterator[None]:
    """MCP servers are forked from the template, without the shell that guards them."""
    from tests.template import forking  # only tests that ask for it pay for it

    with pytest.MonkeyPatch.context() as patch, forking("mcp.server.mcpserver", "ensemble_ray.cli.team_tools"):
        patch.setattr("ensemble_ray.tools.mcp.program._HAS_SHELL", False)
        yield


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> Runtime:
    """A runtime to pass as `runtime=`; the test runs once on each."""
    chosen: Runtime = request.getfixturevalue(f"{request.param}_runtime")
    return chosen


@pytest.fixture
def scripted() -> Callable[..., ScriptedModel]:
    """Makes models that answer from a script."""
    return ScriptedModel


@pytest.fixture
def model_server() -> Iterator[Callable[..., ModelServer]]:
    """Starts protocol servers on loopback; all are ended with the test."""
    begun: list[ModelServer] = []

    def start(*args: object, **options: object) -> ModelServer:
        server = ModelServer(*args, **options)  # type: ignore[arg-type]  passed on as given
        server.__enter__()
        begun.append(server)
        return server

    yield start
    for server in begun:
        server.__exit__(None, None, None)
