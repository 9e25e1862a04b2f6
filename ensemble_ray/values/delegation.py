"""Words of delegation: what one agent asks of another, what came of it, and who may say no.

Values only, and the built-in order of policies; guards stand in `execute`, constraints in `schedule`. A request and its
response share an id, which is also the id of the delegation's events and log lines (S-DEL-31, S-DEL-50).
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self, cast, runtime_checkable

from pydantic import BeforeValidator, Field, field_serializer, model_validator

from ensemble_ray.errors import ValidationError
from ensemble_ray.values.trace import JsonObject, jsonable
from ensemble_ray.values.value import FrozenSequence, Value

if TYPE_CHECKING:
    from ensemble_ray.values.messages import ChatMessage
    from ensemble_ray.values.task_output import TaskOutput


def spoken_role(role: str) -> str:
    """Normalize a role as a delegation finds it: white space around it and case do not count (S-DEL-2, S-HIER-21)."""
    return role.strip().casefold()


class DelegationPriority(StrEnum):
    """How urgent the asker thinks it is; a hint, without effect on scheduling."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"
    CRITICAL = "critical"


class DelegationStatus(StrEnum):
    """What came of a delegation."""

    SUCCESS = "success"
    FAILURE = "failure"
    #: never produced by the built-in tools (S-DEL-32)
    PARTIAL = "partial"


def _id_of(value: object) -> object:
    """Keep the id, or make a fresh one where there is none (07, DelegationRequest)."""
    is_present = value is not None and not (isinstance(value, str) and not value.strip())
    return value if is_present else str(uuid.uuid4())


class DelegationRequest(Value):
    """What one agent asks of another.

    Attributes:
        task_id: Id of this delegation; a fresh UUID when it is left out or blank.
        agent_role: Who shall do it.
        task_description: What to do.
        scope: What the work is about, for policies.
        priority: A hint.
        expected_output_schema: What the result should look like, for policies.
        max_output_retries: Corrections of the result, for policies.
        metadata: Anything else, for policies.

    `replace` keeps the id.
    """

    task_id: Annotated[str, BeforeValidator(_id_of), Field(validate_default=True)] = ""
    agent_role: str
    task_description: str
    scope: JsonObject = Field(default_factory=dict[str, Any])
    priority: DelegationPriority = DelegationPriority.NORMAL
    expected_output_schema: Any = None
    max_output_retries: int = 0
    metadata: JsonObject = Field(default_factory=dict[str, Any])

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        """S-DEL-20; a missing argument counts as None (S-CONV-13)."""
        if isinstance(data, Mapping):
            arguments = cast("Mapping[str, object]", data)
            for name in ("agent_role", "task_description"):
                text = arguments.get(name)
                if text is None or (isinstance(text, str) and not text.strip()):
                    raise ValidationError(f"DelegationRequest {name} must not be blank")
        return data

    @field_serializer("expected_output_schema", when_used="json")
    def _schema_as_json(self, value: object) -> object:
        return jsonable(value)


class DelegationResponse(Value):
    """What came of a delegation; `task_id` is the request's.

    Attributes:
        worker_role: Who did it, or was asked to.
        raw_output: The worker's text; None for a failure.
        parsed_output: None: built-in delegations have no output type.
        artifacts: Always empty for built-in delegations.
        errors: Texts of a failure; empty for a success.
        duration: From the request's creation on.
    """

    task_id: str
    status: DelegationStatus
    worker_role: str
    raw_output: str | None = None
    parsed_output: Any = None
    artifacts: JsonObject = Field(default_factory=dict[str, Any])
    errors: FrozenSequence[str] = ()
    metadata: JsonObject = Field(default_factory=dict[str, Any])
    duration: timedelta = timedelta()

    @field_serializer("parsed_output", when_used="json")
    def _parsed_as_json(self, value: object) -> object:
        return jsonable(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegationPolicyContext:
    """What a policy is told beside the request."""

    #: `Manager` in a hierarchical run
    delegating_agent_role: str
    #: 0: the delegating task is one of the plan
    current_depth: int
    max_depth: int
    #: in order, without that of the delegating agent
    available_worker_roles: Sequence[str]


@dataclass(frozen=True, slots=True)
class DelegationPolicyResult:
    """What a policy says; made by `allow`, `reject` and `modify`.

    Examples:
        >>> DelegationPolicyResult.reject("not today").reason
        'not today'
        >>> DelegationPolicyResult.allow() is DelegationPolicyResult.allow()
        True
    """

    _ALLOW: ClassVar[DelegationPolicyResult]

    verdict: Literal["allow", "reject", "modify"]
    #: of a rejection
    reason: str = ""
    #: of a modification: what takes the request's place
    request: DelegationRequest | None = None

    @classmethod
    def allow(cls) -> DelegationPolicyResult:
        """Go on with the request as it is."""
        return cls._ALLOW

    @classmethod
    def reject(cls, reason: str) -> Self:
        """Say no; the delegating model is told why.

        Raises:
            ValueError: there is no reason.
        """
        if reason is None or not reason.strip():
            msg = "DelegationPolicyResult reason must not be blank"
            raise ValueError(msg)
        return cls("reject", reason=reason)

    @classmethod
    def modify(cls, request: DelegationRequest) -> Self:
        """Go on with another request.

        Raises:
            ValueError: it is None.
        """
        if request is None:
            msg = "DelegationPolicyResult request must not be None"
            raise ValueError(msg)
        return cls("modify", request=request)


DelegationPolicyResult._ALLOW = DelegationPolicyResult("allow")  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  the class cannot make it inside itself


@runtime_checkable
class DelegationPolicy(Protocol):
    """Says whether a delegation may go on; a plain function of the same arguments is a policy too."""

    def evaluate(
        self, request: DelegationRequest, context: DelegationPolicyContext, /
    ) -> DelegationPolicyResult | Awaitable[DelegationPolicyResult]:
        """Allow, reject or modify."""
        ...


#: A policy as a function, sync or async.
PolicyFunction = Callable[
    [DelegationRequest, DelegationPolicyContext], DelegationPolicyResult | Awaitable[DelegationPolicyResult]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """An agent that others may hand work to."""

    #: key of the agent in the plan
    key: str
    role: str
    #: whether its answers stream where the task says nothing
    is_streaming: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegationContext:
    """What all delegations of a run share; data, it travels with the run's frame."""

    #: in the order of the ensemble's agents
    peers: Sequence[Peer] = ()
    #: how deep delegations may be nested (S-DEL-11)
    max_depth: int = 3
    #: names of the policies, in order; they are asked through the run's callables
    policies: Sequence[str] = ()
    #: how long one delegation may take, s; None: as long as it likes
    timeout_s: float | None = None
    #: how many workers of a manager may be at work at the same time; None: no cap
    most_at_once: int | None = None
    #: how often a delegation whose process died is sent to another one
    retries: int = 2

    def find(self, role: str) -> Peer | None:
        """Return the first agent of that role, spelled with other cases or spaces."""
        wanted = spoken_role(role)
        return next((each for each in self.peers if spoken_role(each.role) == wanted), None)

    @property
    def roles(self) -> tuple[str, ...]:
        """Their roles, in order."""
        return tuple(each.role for each in self.peers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRequest:
    """A task, as the runner of its agent is asked to do it.

    The conversation is the one that an agent with a model would send: the role and the goal, then the task with its
    context, memory and notes. A runner that is asked again has its earlier answer and what was wrong with it there.
    """

    #: the system prompt first, the latest question last, what was said before between them
    messages: tuple[ChatMessage, ...]
    description: str
    expected_output: str
    agent_role: str
    #: in context order
    context_outputs: tuple[TaskOutput, ...] = ()
    output_type: type[object] | None = None
    #: JSON schema of `output_type`; None: there is no type, or an endpoint could not be held to it
    output_schema: Mapping[str, object] | None = None
    run_id: str = ""
    #: key of the task in its plan, and the path of this execution
    task: str = ""
    instance: str = ""
    #: 0: the first time that this task asks its runner
    attempt: int = 0
    #: the same when the runner is asked again after a crash, so that it can do its work once; another for each attempt
    idempotency_key: str = ""
    #: whether pieces of the answer are passed on as they come
    is_streaming: bool = False

    @property
    def system_prompt(self) -> str:
        """Who the agent is, as text."""
        return self.messages[0].content or ""

    @property
    def prompt(self) -> str:
        """What is asked now, as text."""
        return self.messages[-1].content or ""

    @property
    def history(self) -> tuple[ChatMessage, ...]:
        """What was said before."""
        return self.messages[1:-1]

    @property
    def text(self) -> str:
        """The whole conversation as one text, for agents that take one."""
        said = (f"{each.role.capitalize()}: {each.content or ''}" for each in self.history)
        return "\n\n".join(part for part in (self.system_prompt, *said, self.prompt) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAnswer:
    """What a runner gives where a text says too little."""

    text: str = ""
    #: JSON-able data or an object of the task's `output_type`; its JSON is the answer where the task has such a type
    #: or there is no text
    structured_output: object = None
    #: that its models read and wrote for it; -1: unknown
    input_tokens: int = -1
    output_tokens: int = -1
    #: why its model stopped, in the words of its provider; `length` stands for an answer that was cut off
    finish_reason: str | None = None
