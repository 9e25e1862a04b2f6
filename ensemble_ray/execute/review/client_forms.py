"""Review gates as forms of the Model Context Protocol: who can be shown one, and the request for one. Package: execute. Needs `mcp`.

Both servers of teams use it: the one on standard input and output, and the endpoint's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mcp_types import ElicitRequest, ElicitRequestFormParams, ElicitResult

from ensemble_ray.execute.review.elicitation import GATE_FORM, ShownGate, gate_message, read_answer

if TYPE_CHECKING:
    from mcp.server import ServerRequestContext
    from mcp_types import InputResponse

    from ensemble_ray.values.reviews import ReviewDecision

__all__ = ["make_gate_form", "read_client_answer", "shows_forms"]


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
