"""A review gate as a form that a client of MCP shows to its user, and what the user filled in. Pure.

Both kinds of server ask with it: the one on standard input and output, and the endpoint's. Nothing of the protocol's package is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mcp_types import ElicitRequest, ElicitRequestFormParams, ElicitResult

from ensemble_ray.values.reviews import Continue, Edit, ExitEarly, ReviewDecision

if TYPE_CHECKING:
    from mcp.server import ServerRequestContext
    from mcp_types import InputResponse


#: Characters of a task's description and of its output that a form shows.
_SHOWN_TASK, _SHOWN_OUTPUT = 500, 4000

#: What the user fills in; the protocol allows flat objects of plain fields alone.
GATE_FORM: Mapping[str, object] = {
    "type": "object",
    "properties": {
        "decision": {
            "type": "string",
            "title": "Decision",
            "description": "approve goes on, edit goes on with your text, exit ends the run",
            "enum": ["approve", "edit", "exit"],
            "default": "approve",
        },
        "text": {
            "type": "string",
            "title": "Text",
            "description": "What takes the place of what is shown; with the decision edit alone",
        },
    },
    "required": ["decision"],
}


class ShownGate(Protocol):
    """An open gate, as far as a form shows it."""

    @property
    def task_description(self) -> str:
        """What was asked for."""
        ...

    @property
    def task_output(self) -> str:
        """What came of it; empty before the task."""
        ...

    @property
    def prompt(self) -> str | None:
        """What the team asks the reviewer."""
        ...

    @property
    def required_role(self) -> str | None:
        """Who is to decide."""
        ...

    @property
    def expires_at(self) -> datetime | None:
        """Until when."""
        ...


def gate_message(gate: ShownGate) -> str:
    """Return what the user is shown above the form."""
    lines = [f"Review: {_cut(gate.task_description, _SHOWN_TASK)}"]
    if gate.prompt:
        lines.append(gate.prompt)
    if gate.required_role:
        lines.append(f"For: {gate.required_role}")
    if gate.expires_at is not None:
        lines.append(f"Until: {gate.expires_at.isoformat(timespec='seconds')}")
    if gate.task_output:
        lines.append(f"\n{_cut(gate.task_output, _SHOWN_OUTPUT)}")
    return "\n".join(lines)


def read_answer(
    action: Literal["accept", "decline", "cancel"], content: Mapping[str, object] | None
) -> ReviewDecision | None:
    """Return what a user decided; None: nothing, and the gate stays open.

    Who declines ends the run; who closes the form, or fills it in so that nothing follows, has decided nothing.
    """
    if action == "decline":
        return ExitEarly()
    decision, text = (content or {}).get("decision"), (content or {}).get("text")
    match action, decision:
        case "accept", "approve":
            return Continue()
        case "accept", "edit" if isinstance(text, str):
            return Edit(text)
        case "accept", "exit":
            return ExitEarly()
        case _:
            return None


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def shows_forms(context: ServerRequestContext[dict[str, Any]]) -> bool:
    """Return whether the client of a call shows forms to its user.

    One that names no kind of question can show forms; one that names pages alone cannot.
    """
    capabilities = context.session.client_capabilities
    elicitation = None if capabilities is None else capabilities.elicitation
    return elicitation is not None and (elicitation.form is not None or elicitation.url is None)


def make_gate_form(gate: ShownGate) -> ElicitRequest:
    """Return the request that has a client show an open gate."""
    return ElicitRequest(params=ElicitRequestFormParams(message=gate_message(gate), requested_schema=dict(GATE_FORM)))


def read_client_answer(answer: InputResponse | None) -> ReviewDecision | None:
    """Return what a client's user decided; None: nothing, and the gate stays open."""
    return read_answer(answer.action, answer.content) if isinstance(answer, ElicitResult) else None
