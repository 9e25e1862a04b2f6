"""Values of delegation: requests, responses, what policies say, who can be found."""

from __future__ import annotations

import pickle
import uuid
from datetime import timedelta

import pydantic
import pytest

from ensemble_ray import (
    DelegationContext,
    DelegationPolicy,
    DelegationPolicyContext,
    DelegationPolicyResult,
    DelegationPriority,
    DelegationRequest,
    DelegationResponse,
    DelegationStatus,
    ValidationError,
)
from ensemble_ray.values.delegation import Peer

GIVEN = {"agent_role": "Writer", "task_description": "Write"}


def test_request_has_its_defaults_when_little_is_given() -> None:
    """07, DelegationRequest; S-DEL-23."""
    request = DelegationRequest(**GIVEN)
    assert str(uuid.UUID(request.task_id, version=4)) == request.task_id
    assert (request.scope, request.metadata, request.max_output_retries) == ({}, {}, 0)
    assert (request.priority, request.expected_output_schema) == (DelegationPriority.NORMAL, None)
    assert [each.value for each in DelegationPriority] == ["low", "normal", "high", "critical"]


@pytest.mark.parametrize("blank", [None, "", " \n"])
def test_id_is_made_when_it_is_blank(blank: str | None) -> None:
    """07, DelegationRequest: each its own."""
    made = {DelegationRequest(**GIVEN, task_id=blank).task_id for _ in range(3)}  # type: ignore[arg-type]
    assert len(made) == 3
    assert DelegationRequest(**GIVEN, task_id="mine").task_id == "mine"


@pytest.mark.parametrize("field", ["agent_role", "task_description"])
@pytest.mark.parametrize("blank", [None, "", "\t", ...])
def test_request_is_refused_when_a_text_is_blank(field: str, blank: object) -> None:
    """S-DEL-20, S-CONV-13: missing is None."""
    wrong = {**GIVEN, field: blank} if blank is not ... else {key: GIVEN[key] for key in GIVEN if key != field}
    with pytest.raises(ValidationError) as caught:
        DelegationRequest(**wrong)  # type: ignore[arg-type]  wrong values are what is tested
    assert str(caught.value) == f"DelegationRequest {field} must not be blank"


def test_copy_keeps_the_id_when_fields_are_replaced() -> None:
    """S-DEL-22: and what is wrong in a copy is refused as in a new one (S-DEL-20)."""
    request = DelegationRequest(**GIVEN, priority="high")
    copy = request.replace(agent_role="Digger")
    assert (copy.task_id, copy.agent_role, copy.priority) == (request.task_id, "Digger", DelegationPriority.HIGH)
    with pytest.raises(ValidationError, match="task_description must not be blank"):
        request.replace(task_description=" ")


def test_values_refuse_changes() -> None:
    """07: request and response are frozen."""
    request = DelegationRequest(**GIVEN)
    response = DelegationResponse(task_id="1", status=DelegationStatus.SUCCESS, worker_role="Writer", raw_output="x")
    for value in (request, response):
        with pytest.raises((pydantic.ValidationError, ValidationError, AttributeError)):
            value.task_id = "other"  # type: ignore[misc]
        assert pickle.loads(pickle.dumps(value)) == value  # noqa: S301  our own bytes


def test_values_come_back_from_their_json() -> None:
    """S-TRC-52: whatever a schema or an output holds."""
    request = DelegationRequest(**GIVEN, scope={"area": {"north"}}, expected_output_schema={"type": "object"})
    assert DelegationRequest.model_validate_json(request.model_dump_json()) == request
    response = DelegationResponse(
        task_id="1", status=DelegationStatus.FAILURE, worker_role="W", errors=["no"], duration=timedelta(seconds=2)
    )
    assert DelegationResponse.model_validate_json(response.model_dump_json()) == response
    assert DelegationRequest(**GIVEN, expected_output_schema=object()).model_dump(mode="json")["expected_output_schema"]


def test_statuses_are_three() -> None:
    """S-DEL-30."""
    assert [each.value for each in DelegationStatus] == ["success", "failure", "partial"]
    response = DelegationResponse(task_id="1", status=DelegationStatus.PARTIAL, worker_role="W")
    assert (response.raw_output, response.parsed_output, response.errors, response.artifacts) == (None, None, (), {})


@pytest.mark.parametrize("reason", [None, "", " \n"])
def test_rejection_needs_a_reason(reason: str | None) -> None:
    """S-DEL-42."""
    with pytest.raises(ValueError, match="reason must not be blank"):
        DelegationPolicyResult.reject(reason)  # type: ignore[arg-type]  None is what is tested


def test_modification_needs_a_request() -> None:
    """S-DEL-42."""
    with pytest.raises(ValueError, match="request must not be None"):
        DelegationPolicyResult.modify(None)  # type: ignore[arg-type]  None is what is tested


def test_verdicts_say_what_they_are() -> None:
    """S-DEL-42: `allow` is a singleton; objects with `evaluate` are policies (S-DEL-40)."""

    class Policy:
        def evaluate(self, request: DelegationRequest, context: DelegationPolicyContext) -> DelegationPolicyResult:
            return DelegationPolicyResult.allow()

    request = DelegationRequest(**GIVEN)
    assert DelegationPolicyResult.allow() is DelegationPolicyResult.allow()
    assert DelegationPolicyResult.reject("no").reason == "no"
    assert DelegationPolicyResult.modify(request).request is request
    assert isinstance(Policy(), DelegationPolicy)


def test_first_colleague_is_found_however_the_role_is_spelled() -> None:
    """S-DEL-2, S-HIER-21: trimmed, whatever the case; the first of two."""
    context = DelegationContext(
        peers=[
            Peer(key="a", role="Writer"),
            Peer(key="b", role=" WRITER"),
            Peer(key="c", role="Straße"),
        ]
    )
    assert {context.find(role) for role in ("writer", " Writer\n", "WRITER")} == {context.peers[0]}
    assert context.find("STRASSE") is context.peers[2]
    assert context.find("Wri ter") is None
    assert context.find("") is None
    assert context.roles == ("Writer", " WRITER", "Straße")
