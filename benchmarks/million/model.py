"""The scripted endpoint: answers, and counts requests by item: `python -m benchmarks.million.model ADDRESS LATENCY_MS`.

Reads commands from stdin: `begin FILE SIZE` starts counting, `counts` prints the counts as JSON.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import re
import sys
import threading
from pathlib import Path

from ensemble_ray.testing import ModelServer, ServedRequest

__all__ = ["REDUCE", "ItemCounter"]

#: Description of each task that reduces.
REDUCE = "Join them"

_ITEM = re.compile(r"item (\d+) ")


class ItemCounter:
    """Counts requests for each item, and those that come after the item's answer was recorded."""

    def __init__(self) -> None:
        self._seen = bytearray()
        self._recorded: bytes | mmap.mmap = b""
        self._counts = {"requests": 0, "items": 0, "repeated": 0, "after_record": 0}

    def begin(self, recorded: Path, size: int) -> None:
        """Count from zero; a byte of the file is 1 once the answer of that item is recorded."""
        self._seen = bytearray(size)
        with recorded.open("r+b") as file:
            self._recorded = mmap.mmap(file.fileno(), size)
        self._counts = dict.fromkeys(self._counts, 0)

    def answer(self, request: ServedRequest) -> str:
        """Count a request and answer it."""
        self._counts["requests"] += 1
        # The prompt of a reduce holds the descriptions of its items.
        if REDUCE not in request.text and (found := _ITEM.search(request.text)):
            number = int(found[1])
            self._counts["repeated" if self._seen[number] else "items"] += 1
            self._counts["after_record"] += self._recorded[number]
            self._seen[number] = 1
        return "A short answer."

    def counts(self) -> dict[str, int]:
        """Return the counts so far."""
        return dict(self._counts)


def _main(address: str, latency_ms: float) -> None:
    counter = ItemCounter()
    server = ModelServer(counter.answer, latency_s=latency_ms / 1000, keep_requests=False, host=address)

    def commands() -> None:
        for line in sys.stdin:
            match line.split():
                case ["begin", file, size]:
                    counter.begin(Path(file), int(size))
                case _:
                    pass
            print(json.dumps(counter.counts()), flush=True)
        server.stop()

    def ready() -> None:
        print(server.base_url, flush=True)
        threading.Thread(target=commands, daemon=True).start()

    asyncio.run(server.serve(ready))


if __name__ == "__main__":
    _main(sys.argv[1], float(sys.argv[2]))
