"""Actions on recorded runs from this machine. Runs execute in separate processes, by the commands of the CLI."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

from ensemble_ray.errors import EnsembleError, RunExistsError, message_of
from ensemble_ray.facts.fact import as_mapping, as_sequence, as_text
from ensemble_ray.process.concurrency import threads
from ensemble_ray.process.private_files import private_directory
from ensemble_ray.record.history import RecordedExecution
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.runs import check_run_id
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.recovery.deciding import record_decision, request_end
from ensemble_ray.studio.http_server import StudioRefusal, not_found
from ensemble_ray.studio.reading import RunViews, fork_obstacle
from ensemble_ray.studio.schemas import Decision, NewFork, PreviewedCall, PreviewedStep, ReviewSchema, RunPreview
from ensemble_ray.studio.views.run_view import review_of
from ensemble_ray.studio.views.steps import title_of
from ensemble_ray.text.foreign_text import one_line
from ensemble_ray.values.ids import new_run_id
from ensemble_ray.values.reviews import ReviewDecision

_ANSWER_S = 60.0  # of a command that only answers: it loads the team
#: Wait for a run to begin, and the interval of the checks. After the wait it counts as begun.
_BEGIN_S, _LOOK_S = 20.0, 0.1
_REFUSED = 2  # exit code for invalid arguments
_SAID = 2000


class OwnProcesses:
    def __init__(self, address: StoreAddress) -> None:
        self._address = address
        self._answering = asyncio.Semaphore(1)  # each answering command loads a team

    async def ask(self, arguments: Sequence[str]) -> Mapping[str, object]:
        """Return the JSON object that a command prints. A failure raises its error output."""
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
            raise EnsembleError("The command printed no JSON object")
        return found

    async def begin(self, arguments: Sequence[str], log: str, has_begun: Callable[[], Awaitable[bool]]) -> None:
        """Start a command in the background, and return when its run exists and is owned or over.

        A failure before that raises the output of the command.
        """
        path, process = await threads.run(self._start, arguments, log)
        threading.Thread(target=process.wait, name="ensemble-ray-studio-run", daemon=True).start()
        deadline = asyncio.get_running_loop().time() + _BEGIN_S
        while asyncio.get_running_loop().time() < deadline:
            if process.returncode is not None:
                if process.returncode and not await has_begun():
                    said = _last_words((await threads.run(path.read_bytes)).decode(errors="replace"))
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
        chosen = {**os.environ, "ENSEMBLE_RAY_HOME": self._address.home}
        chosen.pop("ENSEMBLE_RAY_STORE", None)
        return {**chosen, "ENSEMBLE_RAY_STORE": self._address.url} if self._address.url else chosen


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "ensemble_ray", *arguments]


def _last_words(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [place for place, line in enumerate(lines) if line.startswith("Error:")]
    told = lines[errors[-1] :] if errors else lines[-3:]
    text = " ".join(told).removeprefix("Error:").strip()
    return str(one_line(text, _SAID)) or "The command failed without output"


_DONE = frozenset({"completed", "exited"})


class LocalActions:
    """Implements `StudioActions` for one place."""

    def __init__(self, address: StoreAddress) -> None:
        self._address = address
        self._store = store_at(address)
        self._views = RunViews(self._store)
        self._processes = OwnProcesses(address)

    async def cancel(self, run_id: str) -> None:
        await request_end(self._store, await self._views.summary(run_id))

    async def delete(self, run_id: str) -> None:
        run = await self._views.summary(run_id)
        if run.state.is_active:
            text = (
                f"Run '{run_id}' is running, and its record is not removed. End it first: ensemble-ray cancel {run_id}"
            )
            raise StudioRefusal(HTTPStatus.CONFLICT, "RUN_ACTIVE", text)
        await self._store.delete(run_id)
        await threads.run((Path(self._address.home) / "studio" / f"{run_id}.log").unlink, missing_ok=True)

    async def preview_resume(self, run_id: str) -> RunPreview:
        seen = await self._views.see(run_id)
        view = seen.view.steps
        steps = [state for state in view.history.executions.values() if not state.is_unit]

        def preview(state: RecordedExecution) -> PreviewedStep:
            return PreviewedStep(step=state.id, title=view.show(state).title)

        return RunPreview(
            reused=[preview(each) for each in steps if each.status in _DONE],
            asked_again=[preview(each) for each in steps if each.status not in _DONE],
            unknown_effects=[
                PreviewedCall(step=each.id, tool=call.tool_name, arguments=call.arguments[:2000])
                for each in steps
                for call in (each.open_calls or {}).values()
                if call.effect == "once"  # other calls can be repeated
            ],
            blocked=seen.view.totals.resume_obstacle(seen.summary),
        )

    async def preview_fork(self, run_id: str, from_step: str) -> RunPreview:
        if (obstacle := fork_obstacle(await self._views.see(run_id))) is not None:
            return RunPreview(blocked=obstacle)
        try:
            offer = await self._processes.ask(["fork", run_id, f"--from={from_step}", "--dry-run", "--json"])
        except EnsembleError as error:
            return RunPreview(blocked=message_of(error))
        differences = [str(each) for each in as_sequence(offer.get("differences"))]
        blocked = f"The definition changed: {'; '.join(differences)}" if differences else None
        return RunPreview(
            reused=_list_offered(offer.get("used")), asked_again=_list_offered(offer.get("done_again")), blocked=blocked
        )

    async def resume(self, run_id: str) -> str:
        seen = await self._views.see(run_id)
        if (obstacle := seen.view.totals.resume_obstacle(seen.summary)) is not None:
            raise StudioRefusal(HTTPStatus.CONFLICT, "CANNOT_RESUME", obstacle)
        last = seen.view.cursor

        async def has_begun() -> bool:
            now = await self._store.summary(run_id)
            return now is not None and (bool(now.owner) or (await self._views.see(run_id)).view.cursor > last)

        await self._processes.begin(["resume", run_id, "--quiet"], run_id, has_begun)
        return run_id

    async def fork(self, run_id: str, asked: NewFork) -> str:
        await self._views.summary(run_id)
        new_id = asked.run_id or new_run_id()
        if await self._store.summary(new_id) is not None:
            raise RunExistsError(f"There is a run '{new_id}': choose another id")

        async def has_begun() -> bool:
            return await self._store.summary(new_id) is not None

        arguments = ["fork", run_id, f"--from={asked.from_}", f"--run-id={new_id}", "--quiet"]
        await self._processes.begin(arguments, new_id, has_begun)
        return new_id

    async def decide(
        self, run_id: str, gate_id: str, decision: Decision, *, by: str | None, roles: frozenset[str] | None
    ) -> ReviewSchema:
        await self._views.summary(run_id)
        match decision.decision:
            case "approve":
                taken = ReviewDecision.continue_execution()
            case "edit":
                taken = ReviewDecision.edit(decision.text or "")
            case "exit":
                taken = ReviewDecision.exit_early()
        await record_decision(self._store, run_id, gate_id, taken, by=by, comment=decision.comment, roles=roles)
        seen = await self._views.see(run_id)
        for gate in seen.view.totals.gates:
            if gate.gate_id == gate_id:
                totals = seen.view.totals
                return review_of(
                    gate,
                    ensemble=totals.head.name,
                    subject=totals.subject,
                    at=time.time(),
                    is_owned=False,
                    can_decide=False,
                )
        raise not_found("gate", gate_id)


def _list_offered(tasks: object) -> list[PreviewedStep]:
    return [
        PreviewedStep(step=as_text(each.get("task")), title=title_of(as_text(each.get("description"))))
        for each in map(as_mapping, as_sequence(tasks))
    ]


class StudioActions(Protocol):
    """Actions on runs that a visitor of the page requests."""

    async def cancel(self, run_id: str) -> None:
        """Request the end of a run. A ValidationError: it has ended."""
        ...

    async def delete(self, run_id: str) -> None:
        """Remove the record of a run that is not active. A StudioRefusal or RunExistsError: it is."""
        ...

    async def preview_resume(self, run_id: str) -> RunPreview:
        """Return the steps that a resume reuses, and the steps that it repeats."""
        ...

    async def preview_fork(self, run_id: str, from_step: str) -> RunPreview:
        """Return the same for a fork."""
        ...

    async def resume(self, run_id: str) -> str:
        """Resume a run in a separate process, and return its id. An EnsembleError: it cannot be resumed."""
        ...

    async def fork(self, run_id: str, asked: NewFork) -> str:
        """Start a fork in a separate process, and return its id. An EnsembleError: it cannot begin."""
        ...

    async def decide(
        self, run_id: str, gate_id: str, decision: Decision, *, by: str | None, roles: frozenset[str] | None
    ) -> ReviewSchema:
        """Decide a gate, and return it.

        Raises:
            ReviewDecidedError: the gate is already decided.
            ReviewRoleError: `roles` lacks the role that the gate requires; None: roles are not checked.
            EnsembleError: the gate cannot be decided here.
        """
        ...
