"""Answers for a cluster, in place of what asks one: `python -m tests.studio.probe_double ADDRESS`. Silent where the address says so."""

from __future__ import annotations

import json
import os
import sys

__all__: list[str] = []

if __name__ == "__main__":
    for _ in iter(sys.stdin.readline, ""):
        if sys.argv[1] != "silent":
            sys.stdout.write(json.dumps({"description": {"address": str(os.getpid())}}) + "\n")
            sys.stdout.flush()
