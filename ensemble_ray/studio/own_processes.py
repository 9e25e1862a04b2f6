"""Commands of ours in processes of their own: they outlive the page, and user code runs in them, not here.

In: arguments of `ensemble-ray`. Out: a process that goes on by itself, or what a short command printed. Never: a shell, a command that
a request names, an input of this terminal.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble_ray.errors import EnsembleError
from ensemble_ray.process.forks import threads
from ensemble_ray.process.private_files import private_directory
from ensemble_ray.record.runs import check_run_id
from ensemble_ray.studio.refusals import StudioRefusal
from ensemble_ray.text.foreign_text import one_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from ensemble_ray.record.stores import StoreAddress

#: How long a command that only answers may take, s: it loads the team.
_ANSWER_S = 60.0
#: How long a run may take to begin, s, before it is taken for one that does; and how often it is looked at.
_BEGIN_S, _LOOK_S = 20.0, 0.1
#: Exit code of a command that was asked for what cannot be done.
_REFUSED = 2
#: Characters of what a command said that an error tells.
_SAID = 2000


class OwnProcesses:
    """Starts commands over the runs of one place."""

    def __init__(self, address: StoreAddress) -> None:
        self._address = address
        #: commands that answer are asked one at a time: each loads a team
        self._answering = asyncio.Semaphore(1)

    async def ask(self, arguments: Sequence[str]) -> Mapping[str, object]:
        """Return the JSON object that a command prints.

        Raises:
            EnsembleError: it failed, and what it said.
        """
        async with self._answering:
            process = await asyncio.create_subprocess_exec(
                *_command(arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment(),
            )
            try:
                out, said = await asyncio.wait_for(process.communicate(), _ANSWER_S)
            except TimeoutError:
                raise EnsembleError(f"The team did not load within {_ANSWER_S:.0f} s") from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if process.returncode:
            raise EnsembleError(_last_words(said.decode(errors="replace")))
        try:
            found: object = json.loads(out)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise EnsembleError("The command printed something else than it says")
        return found

    async def begin(self, arguments: Sequence[str], log: str, has_begun: Callable[[], Awaitable[bool]]) -> None:
        """Start a command that goes on by itself, and return when its run has begun.

        Args:
            arguments: Of the command.
            log: Name of the file for what it says.
            has_begun: Whether its run is there and owned, or over.

        Raises:
            StudioRefusal: it refused what it was asked, and what it said.
            EnsembleError: it failed before that, and what it said.
            ValidationError: the name is none for a file.
        """
        path, process = await threads.run(self._start, arguments, log)
        threading.Thread(target=process.wait, name="ensemble-ray-studio-run", daemon=True).start()
        deadline = asyncio.get_running_loop().time() + _BEGIN_S
        while asyncio.get_running_loop().time() < deadline:
            if process.returncode is not None:
                if process.returncode and not await has_begun():
                    said = _last_words(await threads.run(_read, path))
                    if process.returncode == _REFUSED:
                        raise StudioRefusal(HTTPStatus.CONFLICT, "COMMAND_REFUSED", said)
                    raise EnsembleError(said)
                return
            if await has_begun():
                return
            await asyncio.sleep(_LOOK_S)

    def _start(self, arguments: Sequence[str], log: str) -> tuple[Path, subprocess.Popen[bytes]]:
        check_run_id(log)
        folder = private_directory(Path(self._address.home), "studio")
        path = folder / f"{log}.log"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            process = subprocess.Popen(  # noqa: S603  our own command, no shell
                _command(arguments),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self._environment(),
                start_new_session=True,
            )
        return path, process

    def _environment(self) -> dict[str, str]:
        """Return the environment in which commands find the same runs."""
        chosen = {**os.environ, "ENSEMBLE_RAY_HOME": self._address.home}
        chosen.pop("ENSEMBLE_RAY_STORE", None)
        return {**chosen, "ENSEMBLE_RAY_STORE": self._address.url} if self._address.url else chosen


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "ensemble_ray", *arguments]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _last_words(said: str) -> str:
    """Return what a command said of its failure."""
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [place for place, line in enumerate(lines) if line.startswith("Error:")]
    told = lines[errors[-1] :] if errors else lines[-3:]
    text = " ".join(told).removeprefix("Error:").strip()
    return str(one_line(text, _SAID)) or "The command failed and said nothing"
