"""Review gates as forms of MCP clients."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from mcp_types import ElicitRequest, ElicitRequestFormParams, ElicitResult

from ensemble_ray.values.reviews import Continue, Edit, ExitEarly, ReviewDecision

if TYPE_CHECKING:
    from mcp.server import ServerRequestContext
    from mcp_types import InputResponse

_SHOWN_TASK, _SHOWN_OUTPUT = 500, 4000  # characters of a task's description and output in a form

#: MCP allows only flat objects of plain fields.
GATE_FORM: Mapping[str, object] = {
    "type": "object",
    "properties": {
        "decision": {
            "type": "string",
            "title": "Decision",
            "description": "approve continues, edit continues with your text, exit ends the run",
            "enum": ["approve", "edit", "exit"],
            "default": "approve",
        },
        "text": {
            "type": "string",
            "title": "Text",
            "description": "Replacement of the shown text; only with the decision edit",
        },
    },
    "required": ["decision"],
}


class ShownGate(Protocol):
    @property
    def task_description(self) -> str: ...

    @property
    def task_output(self) -> str: ...

    @property
    def prompt(self) -> str | None: ...

    @property
    def required_role(self) -> str | None: ...

    @property
    def expires_at(self) -> datetime | None: ...


def shows_forms(context: ServerRequestContext[dict[str, Any]]) -> bool:
    """Whether a client can show forms: it declares forms, or no kind of elicitation."""
    capabilities = context.session.client_capabilities
    elicitation = None if capabilities is None else capabilities.elicitation
    return elicitation is not None and (elicitation.form is not None or elicitation.url is None)


def make_gate_form(gate: ShownGate) -> ElicitRequest:
    return ElicitRequest(params=ElicitRequestFormParams(message=gate_message(gate), requested_schema=dict(GATE_FORM)))


def gate_message(gate: ShownGate) -> str:
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


def read_client_answer(answer: InputResponse | None) -> ReviewDecision | None:
    """Return the user's decision; declining ends the run. None: closed or incomplete, so the gate stays open."""
    if not isinstance(answer, ElicitResult):
        return None
    if answer.action == "decline":
        return ExitEarly()
    content: Mapping[str, object] = answer.content or {}
    text = content.get("text")
    match answer.action, content.get("decision"):
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
