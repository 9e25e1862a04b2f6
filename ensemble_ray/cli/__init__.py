"""The command line: `ensemble-ray run | plan | trace | demo | doctor | models | schema | version`. Floor: the top.

Out: results on standard output; progress, notes and errors on standard error. Exit codes: 0 fine, 1 the run failed,
2 usage or validation, 130 interrupted. A traceback is shown with `--debug` only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code; the console command `ensemble-ray`."""
    from ensemble_ray.cli.app import invoke

    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows a replacement; a character is no reason to fail.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a text stream, unless somebody replaced it
    try:
        code = invoke(given)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe has seen enough; what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
