"""The Batch API of the scripted server: files, batches, and their faults."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, TypeAlias, cast

import msgspec
from aiohttp import BodyPartReader, web
from msgspec import Struct

from ensemble_ray.testing.model_server.responses import response_bytes
from ensemble_ray.testing.model_server.script import (
    Fault,
    RawAnswer,
    Reply,
    ServedRequest,
    completion_bytes,
    error_bytes,
)

BatchCall: TypeAlias = Literal["upload", "create", "list", "get", "cancel", "download"]
_Status: TypeAlias = Literal[
    "validating", "in_progress", "finalizing", "completed", "expired", "failed", "cancelling", "cancelled"
]
_ENDED = frozenset({"completed", "expired", "failed", "cancelled"})
_PAGE = 20
_CHUNK_BYTES = 2**18


class BatchScript(Struct, frozen=True, kw_only=True):
    """How the server's batches proceed. Their lines have the answers of the server's script.

    A line's `Fault` is an error line with that status; of the kind `drop` the line is missing, of the kind `garbage` it is
    no JSON.

    Attributes:
        polls: Requests for a batch until it ends; None: it stays in progress until `ModelServer.finish_batches`.
        end: How a batch ends; `cancelled`: as if somebody had cancelled it.
        answered: Share of the lines that a batch answers before it expires or is cancelled.
        code: Error code of a failed batch.
        is_shuffled: Whether output files have the lines in another order, and each first line twice.
        unknown_lines: Lines with an unknown id in each output file.
        errors: Calls that are refused with HTTP 500, and how often.
        lost: Calls that take effect, but have no answer, and how often.
        holds: A call that the server never answers, `before` or `after` it takes effect: a client can be killed there.
        page: Batches per page of a list.
    """

    polls: int | None = 1
    end: Literal["completed", "expired", "failed", "cancelled"] = "completed"
    answered: float = 1.0
    code: str = "invalid_json_line"
    is_shuffled: bool = False
    unknown_lines: int = 0
    errors: Mapping[BatchCall, int] = msgspec.field(default_factory=dict["BatchCall", int])
    lost: Mapping[BatchCall, int] = msgspec.field(default_factory=dict["BatchCall", int])
    holds: tuple[BatchCall, Literal["before", "after"]] | None = None
    page: int = _PAGE


class ServedBatch(Struct, kw_only=True, eq=False):
    """One batch of the server."""

    id: str
    file_id: str
    file_name: str
    endpoint: str
    completion_window: str
    metadata: Mapping[str, str]
    lines: Sequence[Mapping[str, object]]
    created_at: int
    status: _Status = "validating"
    polls: int = 0
    answered: int = 0  # lines with an answer, which a provider bills
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    problems: Sequence[Mapping[str, object]] = ()

    @property
    def custom_ids(self) -> Sequence[str]:
        """The ids of its lines, in order."""
        return [str(line.get("custom_id")) for line in self.lines]

    def to_dict(self) -> Mapping[str, object]:
        """Return the JSON form of the protocol."""
        return {
            "id": self.id, "object": "batch", "endpoint": self.endpoint, "input_file_id": self.file_id,
            "completion_window": self.completion_window, "status": self.status, "created_at": self.created_at,
            "output_file_id": self.output_file_id, "error_file_id": self.error_file_id, "metadata": self.metadata,
            "errors": {"object": "list", "data": list(self.problems)} if self.problems else None,
            "request_counts": {"total": len(self.lines), "completed": self.answered, "failed": self.failed},
        }  # fmt: skip


class ServedBatches:
    """Files and batches of one server. `answer` returns the scripted answer of a line."""

    def __init__(self, script: BatchScript, answer: Callable[[ServedRequest], Reply | RawAnswer | Fault]) -> None:
        self.script = script
        self.batches: list[ServedBatch] = []
        self.files: dict[str, tuple[str, bytes]] = {}  # (name, content) by id
        self.calls: Counter[str] = Counter()
        self.held = 0  # calls that are never answered
        self._answer = answer
        self._errors = Counter(script.errors)
        self._lost = Counter(script.lost)
        self._lock = threading.Lock()

    @staticmethod
    def serves(path: str) -> bool:
        """Whether a path belongs to the Batch API."""
        return bool({"files", "batches"} & set(path.partition("?")[0].split("/")))

    async def handle(self, http: web.BaseRequest) -> web.Response | None:
        """Return the answer; None: its connection is to be cut."""
        resource = http.path.partition("/v1/")[2] or http.path.lstrip("/")
        kind, _, rest = resource.partition("/")
        name, _, action = rest.partition("/")
        call = self._call_of(http.method, kind, name, action)
        if call is None:
            return _refused(404, f"Unknown path {http.path}")
        raw = b""
        file_name = ""
        if call == "upload":
            file_name, raw = await _read_upload(http)
        elif http.method == "POST":
            raw = await http.content.read()
        with self._lock:
            held = self.script.holds
            answered = None
            if held != (call, "before"):
                answered = self._answer_call(call, lambda: self._perform(call, name, raw, file_name, http.query))
        if held is not None and held[0] == call:
            self.held += 1
            await asyncio.Event().wait()
        return answered

    def _answer_call(self, call: BatchCall, perform: Callable[[], web.Response]) -> web.Response | None:
        self.calls[call] += 1
        if self._errors[call] > 0:
            self._errors[call] -= 1
            return _refused(500, "scripted fault")
        answered = perform()
        if self._lost[call] > 0:
            self._lost[call] -= 1
            return None
        return answered

    def finish(self, end: Literal["completed", "expired", "failed", "cancelled"] | None = None) -> None:
        """End all open batches."""
        with self._lock:
            for batch in self.batches:
                if batch.status not in _ENDED:
                    self._end(batch, end or self.script.end)

    def _call_of(self, method: str, kind: str, name: str, action: str) -> BatchCall | None:
        calls: Mapping[tuple[str, str, bool, str], BatchCall] = {
            ("POST", "files", False, ""): "upload",
            ("GET", "files", True, "content"): "download",
            ("POST", "batches", False, ""): "create",
            ("GET", "batches", False, ""): "list",
            ("GET", "batches", True, ""): "get",
            ("POST", "batches", True, "cancel"): "cancel",
        }
        return calls.get((method, kind, bool(name), action))

    def _perform(
        self, call: BatchCall, name: str, raw: bytes, file_name: str, query: Mapping[str, str]
    ) -> web.Response:
        match call:
            case "upload":
                file_id = self._store(file_name, raw)
                shown = {"id": file_id, "object": "file", "bytes": len(raw), "created_at": int(time.time())}
                return web.json_response({**shown, "filename": file_name, "purpose": "batch", "status": "processed"})
            case "download":
                if name not in self.files:
                    return _refused(404, f"No such file: {name}")
                return web.Response(body=self.files[name][1], content_type="application/octet-stream")
            case "create":
                return self._create(cast("Mapping[str, object]", json.loads(raw)))
            case "list":
                return self._list(query)
            case "get" | "cancel":
                batch = next((each for each in self.batches if each.id == name), None)
                if batch is None:
                    return _refused(404, f"No such batch: {name}")
                if call == "cancel":
                    if batch.status not in _ENDED:
                        batch.status = "cancelling"
                else:
                    self._advance(batch)
                return web.json_response(batch.to_dict())

    def _create(self, body: Mapping[str, object]) -> web.Response:
        file_id = str(body.get("input_file_id"))
        if file_id not in self.files:
            return _refused(400, f"No such file: {file_id}")
        name, content = self.files[file_id]
        lines = [cast("Mapping[str, object]", json.loads(line)) for line in content.splitlines() if line.strip()]
        batch = ServedBatch(
            id=f"batch_{len(self.batches)}",
            file_id=file_id,
            file_name=name,
            endpoint=str(body.get("endpoint")),
            completion_window=str(body.get("completion_window")),
            metadata=cast("Mapping[str, str]", body.get("metadata") or {}),
            lines=lines,
            created_at=int(time.time()),
        )
        self.batches.append(batch)
        return web.json_response(batch.to_dict())

    def _list(self, query: Mapping[str, str]) -> web.Response:
        newest_first = self.batches[::-1]
        ids = [each.id for each in newest_first]
        after = query.get("after")
        begin = ids.index(after) + 1 if after in ids else 0
        limit = min(int(query.get("limit", _PAGE)), self.script.page)
        page = newest_first[begin : begin + limit]
        has_more = begin + limit < len(newest_first)
        return web.json_response({"object": "list", "data": [each.to_dict() for each in page], "has_more": has_more})

    def _advance(self, batch: ServedBatch) -> None:
        batch.polls += 1
        if batch.status == "cancelling":
            self._end(batch, "cancelled")
        elif batch.status not in _ENDED:
            batch.status = "in_progress"
            if self.script.polls is not None and batch.polls >= self.script.polls:
                self._end(batch, self.script.end)

    def _end(self, batch: ServedBatch, end: Literal["completed", "expired", "failed", "cancelled"]) -> None:
        if end == "failed":
            batch.problems = [{"code": self.script.code, "message": "scripted fault", "line": None, "param": None}]
            batch.status = "failed"
            return
        share = 1.0 if end == "completed" else self.script.answered
        count = round(share * len(batch.lines))
        written: list[bytes] = []
        refused: list[bytes] = []
        for number, line in enumerate(batch.lines):
            if number >= count:
                refused.append(_line(line, error={"code": f"batch_{end}", "message": f"This batch {end}"}))
                continue
            for is_error, encoded in self._answer_line(line, number):
                (refused if is_error else written).append(encoded)
                if is_error:
                    batch.failed += 1
                else:
                    batch.answered += 1
        if self.script.is_shuffled and written:
            written.append(written[0])
            random.Random(0).shuffle(written)  # noqa: S311  an order, no secret
        written += [_line({"custom_id": f"unknown-{number}"}) for number in range(self.script.unknown_lines)]
        batch.output_file_id = self._store("output.jsonl", b"".join(written)) if written else None
        batch.error_file_id = self._store("errors.jsonl", b"".join(refused)) if refused else None
        batch.status = end

    def _answer_line(self, line: Mapping[str, object], number: int) -> Iterator[tuple[bool, bytes]]:
        request = ServedRequest(
            str(line.get("url")), {}, json.dumps(line.get("body")).encode(), number=number, arrived_at=time.time()
        )
        match self._answer(request):
            case Fault(kind="drop") | Fault(kind="silence"):
                return
            case Fault(kind="garbage"):
                yield False, b'{"custom_id": "cut\n'
            case Fault() as fault:
                body = json.loads(error_bytes(fault.message, kind="scripted_error", code=fault.code))
                yield True, _line(line, status=fault.status, body=body)
            case RawAnswer() as raw:
                content = raw.body if isinstance(raw.body, bytes) else b"".join(raw.body)
                yield False, _line(line, status=raw.status, body=json.loads(content))
            case Reply() as reply:
                is_response = request.is_response
                content = (
                    response_bytes(reply, request)
                    if is_response
                    else completion_bytes(reply, model="scripted", number=number)
                )
                yield False, _line(line, body=json.loads(content))

    def _store(self, name: str, content: bytes) -> str:
        file_id = f"file-{len(self.files)}"
        self.files[file_id] = (name, content)
        return file_id


def _line(
    request: Mapping[str, object], *, status: int = 200, body: object = None, error: Mapping[str, str] | None = None
) -> bytes:
    response = None if error is not None else {"status_code": status, "request_id": "req", "body": body}
    line = {"id": "batch_req", "custom_id": request.get("custom_id"), "response": response, "error": error}
    return json.dumps(line).encode() + b"\n"


def _refused(status: int, message: str) -> web.Response:
    body = error_bytes(message, kind="scripted_error")
    return web.Response(body=body, status=status, content_type="application/json")


async def _read_upload(http: web.BaseRequest) -> tuple[str, bytes]:
    name, content = "", b""
    reader = await http.multipart()
    while (part := await reader.next()) is not None:
        if isinstance(part, BodyPartReader) and part.name == "file":
            name, pieces = part.filename or "", list[bytes]()
            while piece := await part.read_chunk(_CHUNK_BYTES):  # unlike `read`, without a limit
                pieces.append(bytes(piece))
            content = b"".join(pieces)
    return name, content
