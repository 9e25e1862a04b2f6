"""How a driver comes to a cluster, where it does not."""

from __future__ import annotations

import logging
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray._private import ray_constants, services
from ray._private.node import Node

from ensemble_ray import EnsembleError
from ensemble_ray.actors.driver import cluster as local_instance
from ensemble_ray.actors.driver import silent_agent
from ensemble_ray.actors.driver.cluster import LOCAL, join_or_start
from ensemble_ray.process.private_files import token_file


@pytest.mark.parametrize("kind", [Exception, TimeoutError, RuntimeError])
def test_what_to_do_is_told_when_ray_cannot_be_started(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    """Whatever it raises: of a start that takes too long that is an `Exception`."""

    def init(**_: object) -> None:
        raise kind("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(
        EnsembleError, match=r"Ray cannot be started on this machine: .*timed out during startup"
    ) as told:
        join_or_start(LOCAL, {})
    assert isinstance(told.value.__cause__, kind)


#: What starts processes of Ray that an instance of one driver has no use for.
_STARTS = {name: getattr(Node, name) for name in ("start_monitor", "start_api_server", "start_log_monitor")}


class _Begun(Exception):  # noqa: N818  ends a start that is only looked at
    pass


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, object]]:
    """What Ray would be started with, and the mode of the token's file at that moment; no instance is started."""
    seen: list[dict[str, object]] = []

    def init(**options: object) -> None:
        file = token_file()
        mode = None if file is None or not file.exists() else stat.S_IMODE(file.stat().st_mode)
        left_out = {name for name in _STARTS if getattr(Node, name) is not _STARTS[name]}
        seen.append(
            {
                **options,
                "mode of token": mode,
                "on loopback": not ray_constants.ENABLE_RAY_CLUSTER,
                "left out": left_out,
            }
        )
        raise _Begun

    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    return seen


def begin(address: str = LOCAL, **options: object) -> None:
    """Come as far as Ray's own start."""
    with pytest.raises(EnsembleError) as ended:
        join_or_start(address, options)
    assert isinstance(ended.value.__cause__, _Begun)


def test_token_is_there_and_private_before_ray_is_started(starts: list[dict[str, object]], tmp_path: Path) -> None:
    """S-SEC-30, S-SEC-31, S-SEC-35: so that Ray makes none itself; its directory is closed to others."""
    begin()
    (seen,) = starts
    assert (seen["mode of token"], seen["on loopback"]) == (0o600, True)
    assert Path(str(seen["_temp_dir"])).parent.stat().st_mode & 0o077 == 0
    assert (
        ray_constants.ENABLE_RAY_CLUSTER
    )  # as Linux has it; other calls of `ray.init` in this process are not concerned
    before = (tmp_path / ".ray" / "auth_token").read_bytes()
    begin()
    assert (tmp_path / ".ray" / "auth_token").read_bytes() == before


def test_ray_is_not_started_when_another_user_chose_the_token(starts: list[dict[str, object]], tmp_path: Path) -> None:
    """S-SEC-33: the error names the file and says what to do."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").symlink_to(tmp_path / "known")
    with pytest.raises(EnsembleError, match=r"auth_token is a symbolic link.*Remove it, and a new one is made"):
        join_or_start(LOCAL, {})
    assert starts == []


def test_choices_of_the_user_stand_and_are_told(
    starts: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S-SEC-30, S-SEC-35, S-SEC-41: an address, a directory; no token, with a warning."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with caplog.at_level(logging.WARNING):
        begin(_node_ip_address="192.0.2.9", _temp_dir="/srv/ray")
    (seen,) = starts
    assert (seen["_temp_dir"], seen["_node_ip_address"]) == ("/srv/ray", "192.0.2.9")
    assert (seen["mode of token"], seen["on loopback"]) == (None, False)
    assert [said for said in caplog.messages if "every user of this machine" in said]


def test_local_instance_has_no_processes_that_nobody_uses(starts: list[dict[str, object]]) -> None:
    """S-SET-42: those that a user asks for are there; other instances of this process are not concerned."""
    begin()
    begin(log_to_driver=True)
    begin(include_dashboard=True)
    assert [seen["left out"] for seen in starts] == [set(_STARTS), set(_STARTS) - {"start_log_monitor"}, set()]
    assert {name: getattr(Node, name) for name in _STARTS} == _STARTS


def test_raylet_starts_the_silent_agent_when_there_is_no_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SET-42: only in the command for the dashboard agent, and only while the raylet is started."""
    commands: list[list[str]] = []
    monkeypatch.setattr(services, "start_ray_process", lambda command, *_, **__: commands.append(command))
    monkeypatch.setattr(
        Node, "start_raylet", lambda _: services.start_ray_process([theirs, "--other=/x/dashboard/agent.py"], "raylet")
    )
    theirs = f"--dashboard_agent_command=python {Path(ray.__file__).parent}/dashboard/agent.py --node-id=1"
    node = SimpleNamespace(_ray_params=SimpleNamespace())
    for has_dashboard in (False, True):
        with local_instance._adapt_raylet(has_dashboard=has_dashboard):
            Node.start_raylet(node)  # type: ignore[arg-type]  it needs no more of one
    ours = f"--dashboard_agent_command=python {silent_agent.__file__} --node-id=1"
    assert [command[0] for command in commands] == [ours, theirs]
    assert {command[1] for command in commands} == {"--other=/x/dashboard/agent.py"}


def _has_ended(process_id: int) -> bool:
    """Whether the process ends within a minute. It may stay a zombie: not every container has an init that reaps it."""
    for _ in range(600):
        try:
            if psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False


def test_silent_agent_reports_its_ports_and_ends_when_its_raylet_has_ended(tmp_path: Path) -> None:
    """S-SET-42: no service has a port. Its parent has ended before it looks, or ends while it runs."""
    agent = f"{sys.executable} {silent_agent.__file__} --session-dir={tmp_path} --node-id=ab"
    wait = "until [ -e dashboard_agent_listen_port_ab ]; do sleep 0.1; done"
    for rest in ("", wait):
        shell = f"RAY_RAYLET_PID=$$ {agent} & echo $! > pid; {rest}"
        subprocess.run(["sh", "-c", shell], check=True, timeout=60, cwd=tmp_path)  # noqa: S603, S607  ours
        assert _has_ended(int((tmp_path / "pid").read_text()))
        for service in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"):
            written = tmp_path / f"{service}_ab"
            assert written.read_text() == "-1"
            written.unlink()


def test_address_and_token_of_a_cluster_that_is_joined_are_its_own(
    starts: list[dict[str, object]], tmp_path: Path
) -> None:
    """S-SEC-39: nothing is made, nothing is changed; one that listens on loopback alone is looked for there."""
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        begin(f"127.0.0.1:{cluster.getsockname()[1]}")
    with socket.create_server(("", 0)) as cluster:
        begin(f"127.0.0.1:{cluster.getsockname()[1]}")
    assert [("_temp_dir" in seen, seen["mode of token"]) for seen in starts] == [(False, None)] * 2
    has_network = not str(ray.util.get_node_ip_address()).startswith("127.")
    assert [seen["on loopback"] for seen in starts] == [has_network, False]
    assert list(tmp_path.iterdir()) == []


def test_instance_is_ended_when_ray_listens_elsewhere_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-30: another version may; the error says what else can be done."""
    ended: list[bool] = []

    class Elsewhere:
        gcs_address = "192.0.2.9:6379"

        def get_node_id(self) -> str:
            return "of another"

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "get_runtime_context", Elsewhere)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    with pytest.raises(EnsembleError, match=r"listens at 192\.0\.2\.9:6379 and not on loopback alone"):
        join_or_start(LOCAL, {})
    assert ended == [True]
