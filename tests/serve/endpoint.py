"""An endpoint that a test started, as its clients see it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import Program

#: What a run of these tests may take on a machine that does a lot of other things meanwhile, s.
_PATIENCE_S = 180


@dataclass(frozen=True)
class Endpoint:
    """A served team."""

    program: Program
    port: int
    records: Path

    def run(self, body: object) -> tuple[int, dict[str, Any]]:
        """Begin a run and wait for its end."""
        return self.ask("POST", "/runs?wait=300", body)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        """Status and JSON of an answer; Serve itself answers in text before the team is there."""
        connection = self.send(method, path, body)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text) if text.startswith(b"{") else {"text": text.decode()}

    def follow(self, run_id: str, after: str = "") -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Id, type and data of the events of a run, as they come; ends where the connection does.

        Comments keep a connection alive, so its own limit does not end the wait for a run that goes on for ever.
        """
        deadline = time.monotonic() + _PATIENCE_S
        connection = self.send("GET", f"/runs/{run_id}/events", after=after)
        answer = connection.getresponse()
        assert answer.status == 200
        fields: dict[str, str] = {}
        with contextlib.closing(connection), contextlib.suppress(http.client.HTTPException, OSError):
            for line in answer:
                assert time.monotonic() < deadline, f"run {run_id} did not end:\n{self.program.text[-3000:]}"
                name, colon, value = line.decode().rstrip("\r\n").partition(": ")
                if colon and name:
                    fields[name] = value
                elif "event" in fields:
                    yield fields.get("id", ""), fields["event"], json.loads(fields["data"])
                    fields = {}

    def kill(self, named: str) -> None:
        """Kill the processes of that name."""
        found = self.program.members(named=named)
        assert found, f"no process is called {named}"
        for pid in found:
            os.kill(pid, signal.SIGKILL)

    def send(
        self, method: str, path: str, body: object = None, *, after: str = "", **more: str
    ) -> http.client.HTTPConnection:
        """Ask, with more headers, and leave the answer to the caller."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        headers = {"content-type": "application/json", **({"last-event-id": after} if after else {}), **more}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection

    def peaks(self) -> dict[int, int]:
        """The most memory, in bytes, that each of its processes that run Python ever had."""
        found: dict[int, int] = {}
        for pid in self.program.members():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
                if "VmHWM:" in text:
                    found[pid] = int(text.partition("VmHWM:")[2].split()[0]) * 1024
        return found

    def is_up(self) -> bool:
        """Whether the team is served."""
        try:
            return self.ask("GET", "/readyz")[0] == 200
        except OSError:
            return False
