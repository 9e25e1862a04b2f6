"""The model server as a process of its own, for benchmarks. Room: testing."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import threading
from collections.abc import Sequence

from ensemble_ray.testing.model_server.server import ModelServer, Script, tool_loop

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve in this process until it is stopped; the first line printed is the base URL."""
    parser = argparse.ArgumentParser(prog="python -m ensemble_ray.testing.model_server", description=main.__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 finds a free port")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="delay of every answer")
    parser.add_argument("--text", default=None, help="answer every request with this text; default: echo")
    parser.add_argument("--tool-turns", type=int, default=0, help="ask for the first tool this often, then answer")
    parser.add_argument("--tool-arguments", default="{}", help="JSON arguments of those tool calls")
    parser.add_argument("--keep-requests", action="store_true", help="count identical requests (costs memory)")
    parser.add_argument("--until-stdin-closes", action="store_true", help="end when the starter is gone")
    chosen = parser.parse_args(arguments)
    script: Script | None = chosen.text
    if chosen.tool_turns:
        script = tool_loop(chosen.tool_turns, arguments=chosen.tool_arguments, text=chosen.text or "done")
    server = ModelServer(
        script, latency_s=chosen.latency_ms / 1000, keep_requests=chosen.keep_requests, port=chosen.port
    )

    def ready() -> None:
        print(server.base_url, flush=True)  # noqa: T201  the starter reads it
        if chosen.until_stdin_closes:
            threading.Thread(target=_stop_at_end_of_input, args=(server,), daemon=True).start()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.serve(ready))


def _stop_at_end_of_input(server: ModelServer) -> None:
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
