"""The endpoint in one process, over the inline runtime: no Ray, no replicas. Prints its URL; its argument is a team file."""

import socket
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn

from ensemble_ray import InlineRuntime
from ensemble_ray.process.config import home_directory
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.catalog import served_team
from ensemble_ray.serve.driving.driven_runs import DrivenRuns
from ensemble_ray.serve.driving.ledger import Ledger
from ensemble_ray.serve.run_service import RunService
from ensemble_ray.teamfile import load_runnable

team = Path(sys.argv[1])


@asynccontextmanager
async def runs() -> AsyncGenerator[RunService]:
    """Drive the runs in this process, with a ledger on the disk."""
    ledger = Ledger(home_directory() / "endpoint" / "benchmark.sqlite")
    driven = DrivenRuns({team.stem: served_team(team.stem, load_runnable(str(team)))}, InlineRuntime(), ledger)
    yield driven
    await driven.close()


with socket.socket() as listening:
    listening.bind(("127.0.0.1", 0))
    listening.listen(2048)  # who is told the URL may connect at once, and waits until the server has started
    server = uvicorn.Server(uvicorn.Config(build_api(runs()), log_level="warning", access_log=False))

    def stop() -> None:
        """End with the harness."""
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=stop, daemon=True).start()
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    server.run([listening])
