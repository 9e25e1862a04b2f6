"""Runs the model server in a separate process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import sys
import threading
from collections.abc import Sequence
from hashlib import sha256
from statistics import NormalDist

from ensemble_ray.testing.model_server.script import Reply, ServedRequest
from ensemble_ray.testing.model_server.server import ModelServer, Script, tool_loop


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve in this process until it is stopped; the first line printed is the base URL."""
    parser = argparse.ArgumentParser(prog="python -m ensemble_ray.testing.model_server", description=main.__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="0 selects a free port")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="delay of every answer")
    parser.add_argument(
        "--latency-spread",
        type=float,
        default=0.0,
        metavar="SIGMA",
        help="lognormal delays around that median, drawn from the request's content (needs --text)",
    )
    parser.add_argument("--text", default=None, help="answer every request with this text; default: echo")
    parser.add_argument("--tool-turns", type=int, default=0, help="call the first tool this many times, then answer")
    parser.add_argument("--tool-arguments", default="{}", help="JSON arguments of those tool calls")
    parser.add_argument("--keep-requests", action="store_true", help="count identical requests (costs memory)")
    parser.add_argument("--until-stdin-closes", action="store_true", help="stop when stdin closes")
    chosen = parser.parse_args(arguments)
    script: Script | None = chosen.text
    if chosen.tool_turns:
        script = tool_loop(chosen.tool_turns, arguments=chosen.tool_arguments, text=chosen.text or "done")
    if chosen.latency_spread:
        if not chosen.text or chosen.tool_turns:
            parser.error("--latency-spread needs --text, and no --tool-turns")
        script = _straggling(chosen.text, median_s=chosen.latency_ms / 1000, sigma=chosen.latency_spread)
        chosen.latency_ms = 0.0
    server = ModelServer(
        script,
        latency_s=chosen.latency_ms / 1000,
        keep_requests=chosen.keep_requests,
        host=chosen.host,
        port=chosen.port,
    )

    def stop_at_end_of_input() -> None:
        sys.stdin.read()
        server.stop()

    def ready() -> None:
        print(server.base_url, flush=True)  # noqa: T201  the parent process reads it
        if chosen.until_stdin_closes:
            threading.Thread(target=stop_at_end_of_input, daemon=True).start()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.serve(ready))


def _straggling(text: str, *, median_s: float, sigma: float) -> Script:
    """Draw delays from the last message, so that equal questions have equal delays."""
    normal = NormalDist()

    def answer(request: ServedRequest) -> Reply:
        drawn = int(sha256(request.text.encode()).hexdigest()[:13], 16)
        return Reply(text=text, latency_s=median_s * math.exp(sigma * normal.inv_cdf((drawn + 0.5) / 16**13)))

    return answer


if __name__ == "__main__":
    main()
