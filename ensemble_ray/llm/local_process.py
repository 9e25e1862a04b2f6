"""The process that serves a local model, on loopback only. It is started by `local.py`.

It reads its key from standard input, and prints its URL as JSON when the model is loaded.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ensemble_ray.llm.local import EngineProcess, locked_record

_POLL_S = 1.0


def main() -> None:
    """Serve until the last holder is gone."""
    parser = argparse.ArgumentParser(prog="python -m ensemble_ray.llm.local_process", description=main.__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--registry", required=True)
    parser.add_argument("--context-tokens", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    chosen = parser.parse_args()
    # The engine's threads keep their cores busy while they wait, unless this variable is set before the import.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    xllamacpp: Any = importlib.import_module("xllamacpp")  # it has no types
    params = xllamacpp.CommonParams()
    params.model.path = chosen.model
    params.model_alias = {Path(chosen.model).stem}
    params.n_ctx = chosen.context_tokens
    params.n_parallel = chosen.slots
    params.cpuparams.n_threads = chosen.threads
    params.cpuparams_batch.n_threads = chosen.threads
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [sys.stdin.readline().strip()]
    params.ui = False
    params.endpoint_props = False
    params.endpoint_slots = False
    params.verbosity = 1  # errors only
    server = xllamacpp.Server(params)  # it serves as long as this object lives
    print(json.dumps({"url": str(server.listening_address)}), flush=True)  # noqa: T201  the starter reads it
    _wait_for_the_last_holder(Path(chosen.registry))
    # An orderly end would wait for open answers.
    os._exit(0)


def _wait_for_the_last_holder(registry: Path) -> None:
    here = EngineProcess.current()
    while True:
        time.sleep(_POLL_S)
        if not registry.exists():
            return
        with locked_record(registry) as record:
            if record.server is not None and record.server != here:
                return
            record.remove_dead()
            if not record.holders:
                record.clear_server()
                return


if __name__ == "__main__":
    main()
