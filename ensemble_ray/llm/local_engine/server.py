"""Holding the embedded model's server: one per machine and model file, shared by all processes. Package: llm.

The first to need it starts it, everybody enters itself in the registry, the last one to leave stops it; the server
itself ends when all holders died without leaving. Everything here blocks, for the seconds that loading takes: it is
called in a thread, never on a loop.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from ensemble_ray.errors import IllegalStateError, ValidationError
from ensemble_ray.llm.local_engine.registry import EngineProcess, LocalSpec, ServerRecord, locked_record, registry_file
from ensemble_ray.process.forks import new_lock

__all__ = ["Address", "acquire", "find_held", "release", "release_all"]

#: Loading a file of many gigabytes from a slow disk takes minutes.
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 5.0
_SHOWN_CHARACTERS = 600


@dataclass(frozen=True, slots=True)
class Address:
    """How to call a server."""

    url: str
    key: str = field(repr=False)


#: What this process holds; a forked child holds nothing of its parent's.
_held: dict[tuple[int, LocalSpec], tuple[Address, EngineProcess]] = {}
_lock = new_lock()


def find_held(spec: LocalSpec) -> Address | None:
    """Return the server's address if this process holds it and it lives; `acquire` starts a dead one again."""
    address, server = _held.get((os.getpid(), spec), (None, None))
    return address if server is not None and server.is_alive else None


def acquire(spec: LocalSpec) -> Address:
    """Hold the server for that model until this process ends, and start it where it does not run. Blocks.

    Raises:
        ValidationError: the engine or the model file is missing.
        IllegalStateError: the server did not start; the text holds the end of its log.
    """
    if not Path(spec.path).is_file():
        raise ValidationError(f"LocalChatModel: there is no model file at {spec.path}")
    if importlib.util.find_spec("xllamacpp") is None:
        raise ValidationError(
            "LocalChatModel needs the engine of the embedded model. Install it: pip install 'ensemble-ray[local]'"
        )
    file = registry_file(spec)
    with _lock, locked_record(file) as record:
        record.forget_dead()
        record.add(EngineProcess.current())
        server = record.server
        if server is None or not record.is_serving:
            server = _start(spec, file, record)
        address = Address(record.url, record.key)
        _held[os.getpid(), spec] = (address, server)
    return address


def release(spec: LocalSpec) -> None:
    """Hold it no more; the last holder stops the server. Blocks for the moment that takes."""
    if _held.pop((os.getpid(), spec), None) is None:
        return
    file = registry_file(spec)
    with locked_record(file) as record:
        record.remove(EngineProcess.current())
        record.forget_dead()
        if not record.holders:
            if record.server is not None:
                _stop(record.server)
            record.clear_server()


@atexit.register
def release_all() -> None:
    """Let go of every server; done at the end of the process by itself."""
    for pid, spec in list(_held):
        if pid == os.getpid():
            with contextlib.suppress(OSError):  # the home may be gone by now; the server will notice
                release(spec)


def _start(spec: LocalSpec, file: Path, record: ServerRecord) -> EngineProcess:
    """Start the server and enter it in the record; the registry's lock is held meanwhile, so others wait."""
    record.clear_server()
    key = secrets.token_urlsafe(24)
    log = file.with_suffix(".log")
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(  # noqa: S603  our own module in our own interpreter
            _command(spec, file),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # Ctrl-C in the starter's terminal is not meant for a server that others hold too.
            start_new_session=True,
        )
    url = _first_word(process, key)
    if not url:
        process.kill()
        code = process.wait()
        record.remove(EngineProcess.current())
        text = log.read_text(encoding="utf-8", errors="replace").strip()[-_SHOWN_CHARACTERS:]
        raise IllegalStateError(
            f"LocalChatModel: the server for {spec.path} did not start (it ended with {code}).\n{text}".rstrip()
        )
    server = EngineProcess.of(process.pid)
    record.server, record.url, record.key = server, url, key
    # Reaped when it ends, so that no zombie is left of it in a process that lives on.
    threading.Thread(target=process.wait, name="ensemble-ray-local-model", daemon=True).start()
    return server


def _command(spec: LocalSpec, file: Path) -> list[str]:
    options = {
        "--model": spec.path,
        "--registry": str(file),
        "--context-tokens": str(spec.context_tokens),
        "--slots": str(spec.slots),
        "--threads": str(spec.threads),
    }
    return [
        sys.executable,
        "-m",
        "ensemble_ray.llm.local_engine.process",
        *(part for pair in options.items() for part in pair),
    ]


def _first_word(process: subprocess.Popen[str], key: str) -> str:
    """Hand over the key and wait for the URL; empty when the process ended or took too long."""
    timer = threading.Timer(_START_TIMEOUT_S, process.kill)
    timer.start()
    try:
        assert process.stdin is not None  # noqa: S101  asked for above
        assert process.stdout is not None  # noqa: S101  same
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(f"{key}\n")
        for line in process.stdout:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # the engine may print lines of its own before
                return str(json.loads(line)["url"])
        return ""
    finally:
        timer.cancel()


def _stop(server: EngineProcess) -> None:
    """End it, kindly first; only if it is still the process that was started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while server.is_alive and time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, number)
            time.sleep(0.02)
