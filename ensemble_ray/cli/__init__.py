"""The command line: `ensemble-ray run | plan | trace | demo | doctor | models | schema | version`.

Out: results on standard output; progress, notes and errors on standard error. Exit codes: 0 fine, 1 the run failed,
2 usage or validation, 3 items were left out, 4 the run waits for reviews, 130 interrupted. A traceback is shown with `--debug` only.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

__all__ = ["main"]

#: Allocations before the youngest generation is looked at for garbage; Python's own default is 700. Modules make none, and a
#: tenth of what a command takes went into looking at them.
_YOUNGEST = 20_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code; the console command `ensemble-ray`."""
    gc.set_threshold(_YOUNGEST, 20, 20)
    from ensemble_ray.cli.app import invoke
    from ensemble_ray.cli.view.terminal import flush_results, frame_results, guard_streams, reserve_stdout

    words = list(sys.argv[1:] if arguments is None else arguments)
    guard_streams()
    if "--json" in words:  # where it is the value of another option, this costs nothing
        reserve_stdout()
    frame_results()
    code = invoke(words)
    flush_results()
    sys.exit(code)
