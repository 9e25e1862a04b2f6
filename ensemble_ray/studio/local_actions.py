"""LocalActions: what is done with recorded runs from this machine. Fulfils `StudioActions`; on the library's loop.

Runs go on and begin in processes of their own, by the commands that a person would use.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import TYPE_CHECKING

from ensemble_ray.errors import EnsembleError, RunExistsError, message_of
from ensemble_ray.facts.lenient import as_mapping, as_sequence, as_text
from ensemble_ray.record.head import read_head
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.resume.advice import resume_advice
from ensemble_ray.recovery.cancelling import request_end
from ensemble_ray.recovery.deciding import record_decision
from ensemble_ray.recovery.resuming import check_resumable
from ensemble_ray.studio.own_processes import OwnProcesses
from ensemble_ray.studio.refusals import StudioRefusal, not_found
from ensemble_ray.studio.run_views import RunViews
from ensemble_ray.studio.schemas.actions import PreviewedCall, PreviewedStep, RunPreview
from ensemble_ray.studio.views.run_view import review_of
from ensemble_ray.studio.views.step_state import title_of
from ensemble_ray.values.ids import new_run_id
from ensemble_ray.values.reviews import ReviewDecision

if TYPE_CHECKING:
    from ensemble_ray.record.history import RecordedExecution
    from ensemble_ray.record.stores import RecordedRun, StoreAddress
    from ensemble_ray.studio.run_views import SeenRun
    from ensemble_ray.studio.schemas.actions import Decision, NewFork
    from ensemble_ray.studio.schemas.runs import ReviewSchema
    from ensemble_ray.studio.views.steps import StepsView

_OF_PROGRAM = "A program began it, which alone knows its team: {0} it there, by ensemble_ray.{0}"
_DONE = frozenset({"completed", "exited"})


class LocalActions:
    """Actions over the runs of one place."""

    def __init__(self, address: StoreAddress) -> None:
        """Act on the runs of a place.

        Raises:
            ValidationError: no store speaks that address.
        """
        self._store = store_at(address)
        self._views = RunViews(self._store)
        self._processes = OwnProcesses(address)

    async def cancel(self, run_id: str) -> None:
        """Ask for the end of a run.

        Raises:
            ValidationError: it has ended.
        """
        await request_end(self._store, await self._views.summary(run_id))

    async def preview_resume(self, run_id: str) -> RunPreview:
        """Return what the run would take from its record, and what it would do again, if it went on."""
        seen = await self._views.see(run_id)
        view = seen.view.steps
        steps = [state for state in view.states.values() if not state.is_unit]
        blocked = self._obstacle(seen)
        return RunPreview(
            reused=[_to_preview(view, each) for each in steps if each.status in _DONE],
            asked_again=[_to_preview(view, each) for each in steps if each.status not in _DONE],
            unknown_effects=[
                PreviewedCall(step=each.id, tool=call.tool_name, arguments=call.arguments[:2000])
                for each in steps
                for call in (each.open_calls or {}).values()
                if call.effect == "once"  # others may simply be made again
            ],
            blocked=blocked,
        )

    async def preview_fork(self, run_id: str, from_step: str) -> RunPreview:
        """Return the same of a new run that does it again from a step on; the team is loaded for it, elsewhere."""
        await self._views.summary(run_id)
        if not (await read_head(self._store, run_id)).source.place:
            return RunPreview(blocked=_OF_PROGRAM.format("fork"))
        try:
            offer = await self._processes.ask(["fork", run_id, f"--from={from_step}", "--dry-run", "--json"])
        except EnsembleError as error:
            return RunPreview(blocked=message_of(error))
        differences = [str(each) for each in as_sequence(offer.get("differences"))]
        blocked = f"What would be used is defined otherwise now: {'; '.join(differences)}" if differences else None
        return RunPreview(
            reused=_list_offered(offer.get("used")), asked_again=_list_offered(offer.get("done_again")), blocked=blocked
        )

    async def resume(self, run_id: str) -> str:
        """Let a run go on in a process of its own, and return its id.

        Raises:
            StudioRefusal: it cannot go on.
            EnsembleError: its process failed before that.
        """
        seen = await self._views.see(run_id)
        if (obstacle := self._obstacle(seen)) is not None:
            raise StudioRefusal(HTTPStatus.CONFLICT, "CANNOT_RESUME", obstacle)
        last = seen.view.cursor

        async def has_begun() -> bool:
            now = await self._store.summary(run_id)
            return now is not None and (bool(now.owner) or (await self._views.see(run_id)).view.cursor > last)

        await self._processes.begin(["resume", run_id, "--quiet"], run_id, has_begun)
        return run_id

    async def fork(self, run_id: str, asked: NewFork) -> str:
        """Begin a fork in a process of its own, and return its id.

        Raises:
            StudioRefusal: it cannot begin as it is asked for.
            RunExistsError: there is a run of that id.
            EnsembleError: it failed before it began.
        """
        await self._views.summary(run_id)
        new_id = asked.run_id or new_run_id()
        if await self._summary(new_id) is not None:
            raise RunExistsError(f"There is a run '{new_id}': choose another id")

        async def has_begun() -> bool:
            return await self._summary(new_id) is not None

        arguments = ["fork", run_id, f"--from={asked.from_}", f"--run-id={new_id}", "--quiet"]
        await self._processes.begin(arguments, new_id, has_begun)
        return new_id

    async def decide(self, run_id: str, gate_id: str, decision: Decision, *, by: str | None) -> ReviewSchema:
        """Decide at a gate, and return it.

        Raises:
            ReviewDecidedError: somebody was first.
            RunExistsError: a process asks its own handler there.
            ValidationError: it waits for nobody.
        """
        await self._views.summary(run_id)
        match decision.decision:
            case "approve":
                taken = ReviewDecision.continue_execution()
            case "edit":
                taken = ReviewDecision.edit(decision.text or "")
            case "exit":
                taken = ReviewDecision.exit_early()
        await record_decision(self._store, run_id, gate_id, taken, by=by, comment=decision.comment)
        seen = await self._views.see(run_id)
        for gate in seen.view.totals.gates:
            if gate.gate_id == gate_id:
                name = seen.view.totals.head.name
                return review_of(gate, ensemble=name, at=time.time(), is_owned=False, can_decide=False)
        raise not_found("gate", gate_id)

    async def _summary(self, run_id: str) -> RecordedRun | None:
        return await self._store.summary(run_id)

    @staticmethod
    def _obstacle(seen: SeenRun) -> str | None:
        """Return why a run cannot go on; None: it can, as far as its record tells."""
        head = seen.view.totals.head
        try:
            check_resumable(seen.summary, head)
        except EnsembleError as error:
            return message_of(error)
        if seen.view.totals.state(seen.summary).value == "completed":
            return f"Run '{seen.summary.run_id}' is completed"
        if not head.source.place:
            return _OF_PROGRAM.format("resume")
        if head.state.value == "budget_exhausted":
            return f"It needs a larger budget: {resume_advice(seen.summary.run_id, head.source.place, field='max_tokens=N')}"
        return None


def _to_preview(view: StepsView, state: RecordedExecution) -> PreviewedStep:
    return PreviewedStep(step=state.id, title=view.show(state).title)


def _list_offered(tasks: object) -> list[PreviewedStep]:
    return [
        PreviewedStep(step=as_text(each.get("task")), title=title_of(as_text(each.get("description"))))
        for each in map(as_mapping, as_sequence(tasks))
    ]
