"""Has the words of a page found in a process of its own. Package: built-in tools. In: HTML of a stranger; out: its text.

The process is held to a processor time, a memory and a time, and is killed with its call; it gets no environment but the
way to its modules, so no key is in reach of a page that breaks the parser.
Never: a process that outlives its call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from weakref import WeakKeyDictionary

from ensemble_ray.errors import message_of

_PROGRAM = Path(__file__).with_name("page_text.py")
#: A page of five megabytes takes about one second of a processor, and 300 MB.
_CPU_S = 10
_MEMORY_BYTES = 1 << 30
#: of the process, on a machine that has no processor to spare
_TIME_S = 60.0
#: pages of one event loop that are parsed at once; each may take its whole memory
_AT_ONCE = min(4, os.cpu_count() or 1)
#: all of this process's environment that the other one gets, beside the way to modules
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PATH", "SYSTEMROOT")
#: how it ends when its processor time is over; on systems without that limit it never does
_OVER_TIME = -int(getattr(signal, "SIGXCPU", 0))
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class PageError(Exception):
    """The words of the page were not found; the text is fit for a model."""


async def read_page(html: str | bytes, *, most_characters: int) -> str:
    """Return the words of a page's body (`page_text`), cut to so many characters.

    Args:
        html: The page; bytes are UTF-8.
        most_characters: How much of its text is wanted.

    Raises:
        PageError: the parser needs more time or memory than a page may cost, or it ended unexpectedly.
    """
    data = html if isinstance(html, bytes) else html.encode("utf-8", "replace")
    async with _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_AT_ONCE)):
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", str(_PROGRAM)),
                *(str(most_characters), str(_CPU_S), str(_MEMORY_BYTES)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=_environment(),
            )
        except OSError as error:
            raise PageError(f"the HTML parser cannot be started: {message_of(error)}") from error
        try:
            async with asyncio.timeout(_TIME_S):
                text, _ = await process.communicate(data)
        except TimeoutError:
            raise PageError(f"its HTML takes more than {_TIME_S:g} s to parse") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
    if process.returncode:
        raise PageError(_reason(process.returncode))
    return text.decode("utf-8")


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}


def _reason(code: int) -> str:
    if code == _OVER_TIME:
        return f"its HTML takes more than {_CPU_S} s of processor time to parse"
    return (
        f"the HTML parser ended unexpectedly, of memory (at most {_MEMORY_BYTES >> 20} MiB) or of an error of its own"
    )
