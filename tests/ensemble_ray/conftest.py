"""Tests of the core are offline: no network, no Ray. What needs a server lives in tests/contracts or tests/scenarios.

A test that starts a process says so with the marker `program`; `make quick` leaves it out.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

#: One example that took longer than 200 ms because the machine was busy is no failure, nor are inputs that take long to
#: draw; and a test that fails has failed for everybody: the examples are the same in every run. Fifty of them take half the time of
#: a hundred, and as they stay the same, the second half finds no more in the next run than it found in the last.
settings.register_profile(
    "core",
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("core")


def _refuse(*_args: object, **_kwargs: object) -> object:
    msg = "Tests of the core are offline: no sockets, no ray.init; see tests/ensemble_ray/conftest.py"
    raise AssertionError(msg)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sockets and Ray raise; the socket pairs of event loops need neither `connect` nor `bind`."""
    for way_out in ("bind", "connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, way_out, _refuse)
    monkeypatch.setattr(socket, "getaddrinfo", _refuse)
    if "ray" in sys.modules:
        monkeypatch.setattr(sys.modules["ray"], "init", _refuse, raising=False)
    else:
        monkeypatch.setitem(sys.modules, "ray", None)  # `import ray` now fails


def _refuse_program(*_args: object, **_kwargs: object) -> object:
    msg = "A test that starts a process has the marker `program`; see tests/ensemble_ray/conftest.py"
    raise AssertionError(msg)


@contextlib.contextmanager
def _alone(item: pytest.Item) -> Iterator[None]:
    """Make starting a process raise where the test does not say that it starts one."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("program") is None:
            patch.setattr(subprocess.Popen, "__init__", _refuse_program)
            for way in ("fork", "posix_spawn", "posix_spawnp"):
                patch.setattr(os, way, _refuse_program)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Refuse processes to fixtures, those of a whole module too."""
    with _alone(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Refuse processes to the test."""
    with _alone(item):
        return (yield)
