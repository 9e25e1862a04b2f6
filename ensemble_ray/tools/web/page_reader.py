"""Extract the text of a page in another process, within limits of processor time, memory and time."""

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
#: A page of 5 MB takes about 1 s and 300 MB.
_CPU_S = 10
_MEMORY_BYTES = 1 << 30
_TIME_S = 60.0  # for a machine under full load
_AT_ONCE = min(4, os.cpu_count() or 1)  # processes per event loop
#: No API keys: a page may attack the parser.
_KEPT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PATH", "SYSTEMROOT")
#: after the limit of processor time, if the system has one
_OVER_TIME = -int(getattr(signal, "SIGXCPU", 0))
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class PageError(Exception):
    """The model reads the text."""


async def read_page(html: str | bytes, *, most_characters: int) -> str:
    """Return the words of a page's body, cut."""
    data = html if isinstance(html, bytes) else html.encode("utf-8", "replace")
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    async with _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_AT_ONCE)):
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", str(_PROGRAM)),
                *(str(most_characters), str(_CPU_S), str(_MEMORY_BYTES)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={**kept, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
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
    if process.returncode == _OVER_TIME and _OVER_TIME:
        raise PageError(f"its HTML takes more than {_CPU_S} s of processor time to parse")
    if process.returncode:
        limit = f"at most {_MEMORY_BYTES >> 20} MiB"
        raise PageError(f"the HTML parser ended unexpectedly, because of memory ({limit}) or an internal error")
    return text.decode("utf-8")
