"""The attachments of a run's tasks: read before the first model call, found again in a record, and stored apart from tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from ensemble_ray.definition.fields import Workflow
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import RecordError, ValidationError
from ensemble_ray.execute.attachments import check_readable
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.plan.planner import Planned, attached_inputs
from ensemble_ray.ports import Journal
from ensemble_ray.record.identity.definition import recorded_attachments
from ensemble_ray.record.stores import RunReader
from ensemble_ray.tools.web.attachments import read_attachment
from ensemble_ray.values.attachments import Attachment

_Recorded = Mapping[tuple[str, str], Attachment]


def restore_attachments(tasks: Sequence[Task], header: PlanRecorded | None) -> Sequence[Task]:
    """Return the tasks of a recorded run with references to the recorded contents, also if a path or URL has changed since."""
    if header is None or not [task for task in tasks if task.attachments]:
        return tasks
    recorded = recorded_attachments(header)
    return [_with(task, [_restored(each, recorded) for each in task.attachments]) for task in tasks]


async def read_attachments(tasks: Sequence[Task], header: PlanRecorded | None = None) -> Sequence[Task]:
    """Return the tasks with the contents of their attachments, each read once.

    A `ValidationError` names the task and the reason. `header`: of the recorded run that is resumed.
    """
    tasks = restore_attachments(tasks, header)
    if not [task for task in tasks if task.attachments]:
        return tasks
    read: dict[Attachment, Attachment] = {}
    found: list[Task] = []
    for task in tasks:
        for each in task.attachments:
            if each not in read:
                read[each] = await _read(task, each)
        found.append(_with(task, [read[each] for each in task.attachments]))
    return found


async def store_attachments(task: Task, journal: Journal) -> Task:
    """Read a task's attachments, and store their contents in the run's record if it has one."""
    if not task.attachments:
        return task
    read = [await _read(task, each) for each in task.attachments]
    return _with(task, [await _store(each, journal) for each in read])


async def read_inputs(inputs: Mapping[str, object]) -> Mapping[str, object]:
    """Return the inputs of a run, with the contents of attachments."""
    attached = attached_inputs(inputs)
    read: dict[str, object] = {}
    for name, many in attached.items():
        try:
            found = [await read_attachment(each) for each in many]
        except ValidationError as error:
            raise ValidationError(f"Input '{name}': {error}") from error
        read[name] = found[0] if isinstance(inputs[name], Attachment) else found
    return {**inputs, **read} if read else inputs


async def store_inputs(
    attached: Mapping[str, Sequence[Attachment]], journal: Journal
) -> Mapping[str, Sequence[Attachment]]:
    """Store the contents of inputs in the run's record if it has one; return references then."""
    return {name: [await _store(each, journal) for each in many] for name, many in attached.items()}


def detach_contents(planned: Planned) -> tuple[Planned, Sequence[bytes]]:
    """Return the plan with references in place of attachments, and the contents to store in the record."""
    contents: dict[str, bytes] = {}
    tasks: dict[str, Task] = {}
    for key, task in planned.tasks.items():
        if task.attachments:
            contents |= {each.sha256: each.data for each in task.attachments if each.data is not None}
            tasks[key] = _with(task, [each.as_reference() for each in task.attachments])
    return (replace(planned, tasks={**planned.tasks, **tasks}) if tasks else planned), tuple(contents.values())


async def copy_contents(attachments: Iterable[Attachment], store: RunReader, run_id: str, journal: Journal) -> None:
    """Copy the contents of references from the record of another run."""
    for digest in sorted({each.sha256 for each in attachments if each.data is None}):
        content = await store.read_content(run_id, digest)
        if content is None:
            raise RecordError(
                f"The record of run '{run_id}' is damaged: the content {digest} of an attachment is missing"
            )
        await journal.store_content(content)


def check_attachments(planned: Planned) -> None:
    """Raise a `ValidationError` for the first task with attachments that its model does not read."""
    for node in planned.plan.nodes:
        task = planned.tasks[node.key]
        if task.attachments and node.agent_key is not None:
            agent = planned.agents[node.agent_key]
            if agent.runner is not None:
                raise ValidationError(
                    f"Task '{node.key}' has {task.attachments[0].label}, and its agent '{agent.role}' has a runner, which "
                    "receives texts only. Use an agent with a model, or pass the file's path or URL in the text"
                )
            check_readable(task.llm or agent.llm, task.attachments, f"Task '{node.key}': ")


def refuse_in_hierarchy(tasks: Iterable[Task], workflow: Workflow) -> None:
    if workflow is not Workflow.HIERARCHICAL:
        return
    for task in tasks:
        if task.attachments:
            raise ValidationError(
                f"Task '{task.description[:80]}' has {task.attachments[0].label}, and a manager passes only texts to its agents. "
                "Use the workflow 'sequential' or 'parallel' for tasks with attachments"
            )


async def _store(attachment: Attachment, journal: Journal) -> Attachment:
    is_stored = attachment.data is not None and await journal.store_content(attachment.data)
    return attachment.as_reference() if is_stored else attachment


def _with(task: Task, attachments: Sequence[Attachment]) -> Task:
    if all(new is old for new, old in zip(attachments, task.attachments, strict=True)):
        return task
    return task.rewritten(attachments=tuple(attachments))


def _restored(attachment: Attachment, recorded: _Recorded) -> Attachment:
    return attachment if attachment.is_read else recorded.get((attachment.kind, attachment.origin), attachment)


async def _read(task: Task, attachment: Attachment) -> Attachment:
    try:
        return await read_attachment(attachment)
    except ValidationError as error:
        raise ValidationError(f"Task '{(task.name or task.description)[:80]}': {error}") from error
