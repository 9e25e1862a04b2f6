"""TaskStream: what a stream of the A2A protocol tells of one run (S-INT-76). Pure.

In: events of the run, then how it ended or what it asks. Out: events of the protocol. Rule: at the end the artifact is the run's output,
whatever was said of it before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.serve.a2a.tasks import artifact_event, status_event, text_event, working_event
from ensemble_ray.serve.asked_run import DoneTask, token_of
from ensemble_ray.serve.run_schemas import RunDetail, RunEvent

if TYPE_CHECKING:
    from a2a.types import TaskArtifactUpdateEvent, TaskStatusUpdateEvent

#: Characters of a task's description that are told of one that is done.
_SHOWN = 200


class TaskStream:
    """What was told of a run so far."""

    def __init__(self, run: RunDetail, streamed_task: str | None) -> None:
        """Begin a stream.

        Args:
            run: The run.
            streamed_task: Instance of the task whose tokens are the output; None: it is told at the end alone.
        """
        self._run = run
        self._streamed_task = streamed_task
        self._said = ""
        self._turn = 0
        self._is_working = False

    def events(self, happened: RunEvent | RunDetail) -> list[TaskStatusUpdateEvent | TaskArtifactUpdateEvent]:
        """Return what is told of an event, or of the run's end."""
        if isinstance(happened, RunDetail):
            return self._end(happened)
        if (token := token_of(happened)) is not None:
            if token.instance != self._streamed_task or token.is_reasoning or not token.token:
                return []
            if token.iteration_index != self._turn:  # what a model says before it calls tools is not the output
                self._turn, self._said = token.iteration_index, ""
            is_first = not self._said
            self._said += token.token
            return [text_event(self._run, token.token, is_first=is_first)]
        match happened.type:
            case "task_started" if not self._is_working:
                self._is_working = True
                return [working_event(self._run)]
            case "task_completed":
                self._is_working = True
                done = DoneTask.model_validate(happened.data)
                text = f"Done by {done.agent_role}: {done.task_description[:_SHOWN]}"
                return [working_event(self._run, text)]
            case _:
                return []

    def _end(self, run: RunDetail) -> list[TaskStatusUpdateEvent | TaskArtifactUpdateEvent]:
        output = artifact_event(run)
        if output is None or [each.text for each in output.artifact.parts] == [self._said]:
            return [status_event(run)]
        return [output, status_event(run)]
