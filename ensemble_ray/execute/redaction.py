"""Redaction of definitions, plans, orders, errors and facts, where they come into a run."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from msgspec.structs import replace

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.task import Task
from ensemble_ray.errors import StaleEpochError, ValidationError
from ensemble_ray.execute.orders import TaskOrder
from ensemble_ray.facts.effects import ValueRedacted
from ensemble_ray.facts.fact import Fact, FactData
from ensemble_ray.facts.runs import PlanRecorded, StimulusRecorded
from ensemble_ray.plan.plan import Plan
from ensemble_ray.plan.planner import Planned, ResolvedTasks
from ensemble_ray.ports import Journal
from ensemble_ray.text.redaction import Redaction, map_texts
from ensemble_ray.values.attachments import Attachment
from ensemble_ray.values.error_data import error_data, error_from
from ensemble_ray.values.messages import ChatResponse
from ensemble_ray.values.task_output import OutputType

D = TypeVar("D", bound=FactData)

#: Media types of text attachments.
_TEXTS = ("text/", "application/json", "application/xml", "application/x-ndjson", "application/yaml")
#: Entries of a stimulus that name things.
_OF_STIMULUS = frozenset({"key", "instance", "unit", "question", "error_type", "reason", "delegated_roles"})


# Definitions and plans.


def clean_task(redaction: Redaction, task: Task) -> Task:
    changes: dict[str, object] = {}
    for name in (
        "description",
        "expected_output",
        "revision_feedback",
        "prior_attempt_output",
        "history",
        "additional_context",
    ):
        value: object = getattr(task, name)
        if value and (cleaned := redaction.clean_data(value)) is not value:
            changes[name] = cleaned
    for name in ("review", "before_review"):
        review = getattr(task, name)
        if review is not None and (cleaned := redaction.clean_data(review)) is not review:
            changes[name] = cleaned
    if task.attachments:
        changes["attachments"] = clean_attachments(redaction, task.attachments)
    return task.rewritten(**changes) if changes else task


def clean_agent(redaction: Redaction, agent: Agent) -> Agent:
    """Return the agent with clean texts. A role names the agent, so a `ValidationError` refuses one with a value."""
    _check_name(redaction, agent.role, "the role of an agent")
    changes: dict[str, object] = {}
    for name in ("goal", "background", "response_format"):
        text: str | None = getattr(agent, name)
        if text and (cleaned := redaction.clean(text)) is not text:
            changes[name] = cleaned
    return agent.rewritten(**changes) if changes else agent


def clean_attachments(redaction: Redaction, attachments: Sequence[Attachment]) -> tuple[Attachment, ...]:
    """Clean names, and the contents that are texts; the contents of pictures, audio and documents stay as they are."""
    return tuple([_clean_attachment(redaction, each) for each in attachments])


def _clean_attachment(redaction: Redaction, attachment: Attachment) -> Attachment:
    data, name = attachment.data, redaction.clean(attachment.name)
    if data is not None and attachment.media_type.startswith(_TEXTS):
        with suppress(UnicodeDecodeError):
            text = data.decode()
            cleaned = redaction.clean(text)
            data = data if cleaned is text else cleaned.encode()
    if data is attachment.data:
        if name == attachment.name:
            return attachment
        changed = copy.copy(attachment)
        object.__setattr__(changed, "name", name)
    else:
        changed = type(attachment)(data or b"", name=name, media_type=attachment.media_type)
        object.__setattr__(changed, "origin", attachment.origin)
    return changed


def clean_resolved(redaction: Redaction, resolved: ResolvedTasks) -> ResolvedTasks:
    """Clean tasks and inputs, before agents are made for them and before they are planned."""
    for key in (*resolved.keys, *resolved.inputs):
        _check_name(redaction, key, "the name of a task or an input")
    return replace(
        resolved,
        tasks=tuple([clean_task(redaction, task) for task in resolved.tasks]),
        inputs=clean_inputs(redaction, resolved.inputs),
        attached={name: clean_attachments(redaction, each) for name, each in resolved.attached.items()},
    )


def clean_inputs(redaction: Redaction, inputs: Mapping[str, str]) -> dict[str, str]:
    return {name: redaction.clean(text) for name, text in inputs.items()}


def clean_planned(redaction: Redaction, planned: Planned) -> Planned:
    return replace(
        planned,
        plan=_clean_plan(redaction, planned.plan),
        tasks={key: clean_task(redaction, task) for key, task in planned.tasks.items()},
        agents={key: clean_agent(redaction, agent) for key, agent in planned.agents.items()},
        redaction=redaction,
    )


def _clean_plan(redaction: Redaction, plan: Plan) -> Plan:
    clean = redaction.clean
    return dataclasses.replace(
        plan,
        nodes=tuple(
            [
                dataclasses.replace(
                    node, description=clean(node.description), expected_output=clean(node.expected_output)
                )
                for node in plan.nodes
            ]
        ),
        agents=tuple(
            [
                dataclasses.replace(
                    agent,
                    goal=clean(agent.goal),
                    background=None if agent.background is None else clean(agent.background),
                )
                for agent in plan.agents
            ]
        ),
        inputs=clean_inputs(redaction, plan.inputs),
    )


def _check_name(redaction: Redaction, name: str, what: str) -> None:
    if redaction.holds_value(name):
        raise ValidationError(
            f"Redaction: {what} contains a value that the redactor replaces: '{redaction.clean(name)}'. Names are recorded "
            "as they are: choose another name"
        )


# Tasks.


def clean_order(redaction: Redaction, order: TaskOrder) -> TaskOrder:
    """Clean feedback of the user's code, and directives of people."""
    task = clean_task(redaction, order.task)
    directives = tuple([redaction.clean(each) for each in order.directives])
    if task is order.task and directives == order.directives:
        return order
    return replace(order, task=task, directives=directives)


def clean_response(redaction: Redaction, response: ChatResponse) -> ChatResponse:
    if response.tool_calls:
        calls = [
            dataclasses.replace(call, arguments=redaction.clean_json(call.arguments)) for call in response.tool_calls
        ]
        response = dataclasses.replace(response, tool_calls=tuple(calls))
    if response.text:
        response = dataclasses.replace(response, text=redaction.clean_json(response.text))
    return redaction.clean_data(response)


def clean_error(redaction: Redaction, error: BaseException, output_type: OutputType | None = None) -> BaseException:
    """Return the error, or an equal one with clean texts, if a text of it or of its causes has a value."""
    data = error_data(error)
    cleaned = redaction.clean_data(data)
    if cleaned is data:
        return error
    return error_from(cleaned, output_type=output_type).with_traceback(error.__traceback__)


async def restore_arguments(redaction: Redaction, journal: Journal, arguments: str) -> str:
    """Return a tool's arguments with their values, those of other processes from the record."""
    await learn_from(redaction, journal, arguments)
    return redaction.restore_json(arguments)


async def learn_from(redaction: Redaction, journal: Journal, text: str) -> None:
    """Read the values of unknown placeholders from the record."""
    if not redaction.is_reversible:
        return
    for name in redaction.unknown_in(text):
        for fact in (await journal.lookup_recorded(name)).values():
            if isinstance(fact.data, ValueRedacted):
                redaction.learn(name, fact.data.token)


# Facts.


def clean_fact(redaction: Redaction, data: D) -> D:
    """Return the content of a fact without values: the last net, behind the places where texts come in."""
    match data:
        case PlanRecorded():  # made of a clean plan; its keys name things
            cleaned = {
                name: map_texts(getattr(data, name), redaction.clean, has_keys=False)
                for name in ("definition", "inputs", "items", "options", "overrides", "tags")
            }
            return replace(data, **cleaned)
        case StimulusRecorded(fields=fields):
            kept = {name: each if name in _OF_STIMULUS else redaction.clean_data(each) for name, each in fields.items()}
            return replace(data, fields=kept)
        case ValueRedacted():
            return data
        case _:
            return redaction.clean_data(data)


async def record_values(
    redaction: Redaction, append: Callable[[Fact], Awaitable[None]], *, run_id: str, at: float, epoch: int
) -> None:
    """Record new values of a reversible run, each under the name of its placeholder, before the texts that contain it.

    Two dispatches of a task may record the same value. The store refuses the one of the older epoch, which is no loss.
    """
    for name, token in redaction.take_fresh():
        with suppress(StaleEpochError):
            await append(Fact(run=run_id, name=name, at=at, data=ValueRedacted(token=token), epoch=epoch))
