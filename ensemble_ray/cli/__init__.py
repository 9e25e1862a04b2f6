"""The `ensemble-ray` command. Results go to standard output; progress, notes and errors go to standard error."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

__all__ = ["main"]

# Python's default is 700. Imports make little garbage, and a tenth of a command's time went into collecting it.
_YOUNGEST_THRESHOLD = 20_000


def main(arguments: Sequence[str] | None = None) -> None:
    gc.set_threshold(_YOUNGEST_THRESHOLD, 20, 20)
    from ensemble_ray.cli.app import invoke
    from ensemble_ray.cli.view.terminal import flush_results, frame_results, guard_streams, reserve_stdout

    words = list(sys.argv[1:] if arguments is None else arguments)
    guard_streams()
    if "--json" in words:
        reserve_stdout()
    frame_results()
    code = invoke(words)
    flush_results()
    sys.exit(code)
