"""One variant of one warm scenario, in its own process: a line in, one round, a line out.

Started by the harness as `python -m benchmarks.worker JOB SETTING`. The floor's worker must never import
`ensemble_ray`.
"""

from __future__ import annotations

import importlib
import json
import sys

from benchmarks.setting import Setting

__all__ = ["main"]


def main() -> None:
    """Do a round per line of input; the first line of output says that the job is ready."""
    job, told = sys.argv[1:]
    module, _, name = job.partition(":")
    make = getattr(importlib.import_module(f"benchmarks.jobs.{module}"), name)
    with make(Setting(**json.loads(told))) as one_round:
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps(one_round()), flush=True)


if __name__ == "__main__":
    main()
