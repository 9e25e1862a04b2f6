"""The process that serves the embedded model. Package: llm; started by `server.py`, never imported by it.

It gets its key on the standard input, prints one line of JSON with its URL when the model is loaded, then looks every
second which processes still hold it, and ends itself when none of them is alive. It listens on loopback only.
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
    server = _load(chosen, key=sys.stdin.readline().strip())
    print(json.dumps({"url": str(server.listening_address)}), flush=True)  # noqa: T201  the starter reads it
    _wait_for_the_last_holder(Path(chosen.registry))
    # The engine's threads have nothing to save; an orderly end would wait for answers that nobody reads.
    os._exit(0)


def _load(chosen: argparse.Namespace, *, key: str) -> Any:
    """Load the engine's server and have it listen; it lives as long as the object. The engine carries no types."""
    # Its threads wait for each other many times per token. By default they keep their cores while they wait: where
    # something else wants those, an answer takes many times longer. Read when the engine is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    xllamacpp: Any = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = chosen.model
    params.model_alias = {Path(chosen.model).stem}
    params.n_ctx = chosen.context_tokens
    params.n_parallel = chosen.slots
    params.cpuparams.n_threads = chosen.threads
    params.cpuparams_batch.n_threads = chosen.threads
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [key]
    params.ui = False
    params.endpoint_props = False
    params.endpoint_slots = False
    params.verbosity = 1  # errors only
    return xllamacpp.Server(params)


def _wait_for_the_last_holder(registry: Path) -> None:
    here = EngineProcess.current()
    while True:
        time.sleep(_POLL_S)
        if not registry.exists():
            return
        with locked_record(registry) as record:
            if record.server is not None and record.server != here:
                return
            record.forget_dead()
            if not record.holders:
                record.clear_server()
                return


if __name__ == "__main__":
    main()
