"""Other users of the machine, beside a local Ray instance that is at work: what they reach, read and can plant."""

from __future__ import annotations

import http.client
import os
import pickle
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import ray

from ensemble_ray import Ensemble, OpenAIChatModel, Run, Runtime
from ensemble_ray.actors.scheduler.submission_store import KEY_NAME, Seal
from ensemble_ray.process.private_files import token_file
from ensemble_ray.testing import ModelServer
from tests.attack.neighbours import Listener, closed_above, command_lines, descendants, files_with, listeners
from tests.builders import agent, call, task
from tests.scenarios.dying import kill_actor, marks_of, stay, staying, until_recorded
from tests.scenarios.teams import PATIENCE_S, Marks, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

#: Long enough to be found by no chance.
KEY = "sk-neighbours-must-not-read-this-key"
#: Where Ray and its libraries keep things in the cluster's store.
NAMESPACES = (
    *(None, b"ensemble_ray", b"fun", b"dashboard", b"session", b"cluster", b"autoscaler", b"healthcheck", b"job"),
    *(b"ray_pdb", b"serve", b"tracing", b"usage_stats"),
)
#: One command of each service behind Ray's ports.
COMMANDS = (
    "InternalKVGcsService/InternalKVKeys",
    "NodeManagerService/GetNodeStats",
    "CoreWorkerService/PushTask",
    "ObjectManagerService/Push",
    "ReporterService/HealthCheck",
    "events.EventAggregatorService/AddEvents",
)


@dataclass(frozen=True, slots=True)
class AtWork:
    """A run under way whose model has a key."""

    run: Run
    #: the processes of the instance
    pids: frozenset[int]
    gcs_port: int
    session: Path


@pytest.fixture(scope="module")
def at_work(ray_runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AtWork]:
    """One run for all questions."""
    place = tmp_path_factory.mktemp("at work")
    marks = Marks(place / "marks")
    script = [call("stay", marks_of(marks)), "done"]
    with pytest.MonkeyPatch.context() as patch, ModelServer(script, api_key=KEY) as server:
        patch.setenv("ENSEMBLE_RAY_HOME", str(place / "home"))
        patch.delenv("ENSEMBLE_RAY_STORE", raising=False)
        model = OpenAIChatModel("any", api_key=KEY, base_url=server.base_url)
        run = Ensemble(tasks=[task("go", agent(model, tools=[stay]))]).start(runtime=ray_runtime)
        until(lambda: marks.lines, "the tool")
        until(lambda: in_store(f"run:{run.id}", b"ensemble_ray"), "the package in the store")
        node = cast("Any", ray)._private.worker._global_node
        roots = [each.process.pid for several in node.all_processes.values() for each in several]
        pids = frozenset(pid for root in roots for pid in descendants(root))
        port = int(str(ray.get_runtime_context().gcs_address).rpartition(":")[2])
        yield AtWork(run, pids, port, Path(node.get_session_dir_path()))
        marks.add("over")
        assert run.result(timeout_s=PATIENCE_S).raw == "done"


def in_store(name: str | bytes, namespace: bytes | None) -> bytes | None:
    """What the cluster's store has there."""
    from ray.experimental import internal_kv

    found: bytes | None = internal_kv._internal_kv_get(name, namespace=namespace)
    return found


def names_in_store(prefix: str = "") -> list[bytes]:
    """What it has names for, of all namespaces."""
    from ray.experimental import internal_kv

    return cast("list[bytes]", internal_kv._internal_kv_list(prefix))


def token() -> bytes:
    """What a neighbour would need."""
    path = token_file()
    return os.environ["RAY_AUTH_TOKEN"].encode() if path is None else path.read_bytes().strip()


def test_nothing_listens_beyond_loopback(at_work: AtWork) -> None:
    """S-SEC-30: of no process of the instance, control service, workers, metrics and this driver included."""
    found = listeners({*at_work.pids, os.getpid()})
    assert at_work.gcs_port in {each.port for each in found}
    assert len({each.pid for each in found}) > 5
    assert [each for each in found if not each.is_on_loopback] == []


def test_address_beyond_loopback_is_noticed() -> None:
    """S-SEC-30: by the test above, in each form in which the kernel tells it."""
    hosts = ("0.0.0.0", "::", "192.0.2.2", "::ffff:192.0.2.2", "127.0.0.1", "::1", "::ffff:127.0.0.1")  # noqa: S104  only compared
    assert [Listener(1, host, 1).is_on_loopback for host in hosts] == [False] * 4 + [True] * 3


def commanded(port: int, command: str, *, bearer: bytes | None = None) -> str:
    """How a port answers to a command."""
    import grpc

    metadata = () if bearer is None else (("authorization", f"Bearer {bearer.decode()}"),)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(f"/ray.rpc.{command}")(b"", timeout=20, metadata=metadata)
        except grpc.RpcError as error:
            return str(cast("Any", error).code().name)
    return "OK"


def asked(port: int, method: str) -> tuple[int, bytes]:
    """How a port answers to a request over HTTP; 0 where it does not."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/get_or_create_runtime_env", method=method, data=b"")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310  a port of ours
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except (OSError, http.client.HTTPException):  # it speaks something else
        return 0, b""


def test_no_port_takes_commands_without_the_token(at_work: AtWork) -> None:
    """S-SEC-34: each refuses them, or knows none; who has the token is served. What answers to anybody are metrics."""
    ours = {each.port for each in listeners(at_work.pids)}
    answers = {port: {commanded(port, command) for command in COMMANDS} for port in ours}
    pages = {port: [asked(port, method) for method in ("GET", "POST")] for port in ours}
    assert not [port for port, codes in answers.items() if "OK" in codes]
    demanding = {port for port, codes in answers.items() if "UNAUTHENTICATED" in codes}
    demanding |= {port for port, (_, (status, _)) in pages.items() if status in (401, 403)}
    telling = {port for port, ((status, _), _) in pages.items() if status == 200}
    assert demanding | telling == ours
    assert all(KEY.encode() not in text and token() not in text for each in pages.values() for _, text in each)
    assert all(pages[port][0][1].startswith(b"# HELP") for port in telling)
    assert all(pages[port][1][0] in (404, 405) for port in telling)
    keys = COMMANDS[0]
    assert commanded(at_work.gcs_port, keys, bearer=b"0" * 64) == "UNAUTHENTICATED"
    assert commanded(at_work.gcs_port, keys, bearer=token()) == "OK"


def test_files_of_the_instance_are_out_of_reach(at_work: AtWork) -> None:
    """S-SEC-31, S-SEC-35: Ray leaves its sockets and ports in directories that all may write to, below a closed one."""
    closed = closed_above(at_work.session)
    assert closed is not None
    assert list(at_work.session.rglob("sockets/raylet"))
    path = token_file()
    assert path is None or path.stat().st_mode & 0o077 == 0


def test_key_is_found_nowhere_in_the_store_nor_in_files_nor_in_command_lines(at_work: AtWork) -> None:
    """S-SEC-36: while the run that uses it goes on. The package of the run is there, and not to be read."""
    names = names_in_store()
    package = f"run:{at_work.run.id}".encode()
    assert package in names
    found = [(place, value) for name in names for place in NAMESPACES if (value := in_store(name, place)) is not None]
    assert {b"ensemble_ray", b"fun"} <= {place for place, _ in found}
    values = [value for _, value in found]
    secrets = (KEY.encode(), token())
    assert not [value for value in (*names, *values) if any(secret in value for secret in secrets)]
    assert len(in_store(package, b"ensemble_ray") or b"") > 1000
    assert files_with(secrets, at_work.session) == []
    assert not [
        line for line in command_lines({*at_work.pids, os.getpid()}) if any(secret in line for secret in secrets)
    ]


class Planted:
    """A pickle that leaves a mark where it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.mark,))


def test_planted_packages_are_not_loaded_when_the_scheduler_is_started_again(
    ray_runtime: Runtime, tmp_path: Path, home: str
) -> None:
    """S-SEC-37: raw, sealed by somebody else, taken from another run; that run itself goes on."""
    from ray.experimental import internal_kv

    mark, marks = tmp_path / "loaded", Marks(tmp_path / "marks")
    model, worker = staying(marks)
    run = Ensemble(tasks=[task("go", worker)]).start(runtime=ray_runtime)
    until(lambda: marks.lines, "the tool")
    ours = until(lambda: in_store(f"run:{run.id}", b"ensemble_ray"), "the package in the store")
    until_recorded(home, run)
    body = pickle.dumps(Planted(mark))
    planted = {
        b"run:planted-raw": body,
        b"run:planted-sealed": Seal(tmp_path / "a.key").seal("planted-sealed", body),
        b"run:planted-replayed": ours,
    }
    for name, value in planted.items():
        internal_kv._internal_kv_put(name, value, overwrite=True, namespace=b"ensemble_ray")
    kill_actor("scheduler")
    until(lambda: len(marks.lines) == 2, "the task in another process")
    until(lambda: not {*planted} & {*names_in_store("run:")}, "the planted packages to be dropped")
    marks.add("over")
    assert run.result(timeout_s=PATIENCE_S).raw == "survived"
    assert len(model.calls) == 2
    assert not mark.exists()
    pickle.loads(body)  # noqa: S301  our own
    assert mark.exists()  # as it would have been


def test_run_goes_on_by_its_driver_when_the_key_cannot_be_trusted(
    ray_runtime: Runtime, tmp_path: Path, home: str, cluster_home: Path
) -> None:
    """S-SEC-38: its package is not kept, so the next scheduler knows nothing of it and is told again."""
    key, known = cluster_home / KEY_NAME, tmp_path / "known"
    if key.exists():
        key.rename(known)
    key.symlink_to(known)
    try:
        marks = Marks(tmp_path / "marks")
        model, worker = staying(marks)
        run = Ensemble(tasks=[task("go", worker)]).start(runtime=ray_runtime)
        until(lambda: marks.lines, "the tool")
        until_recorded(home, run)
        kill_actor("scheduler")
        until(lambda: len(marks.lines) == 2, "the task in another process")
        assert in_store(f"run:{run.id}", b"ensemble_ray") is None
        marks.add("over")
        assert run.result(timeout_s=PATIENCE_S).raw == "survived"
        assert len(model.calls) == 2
    finally:
        key.unlink()
        if known.exists():
            known.rename(key)
