"""Delegations: requests, responses and policies, and the requests to the runner of an agent."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Self, cast, runtime_checkable

from msgspec import Struct
from pydantic import BeforeValidator, Field, field_serializer, model_validator

from ensemble_ray.errors import ValidationError
from ensemble_ray.values.trace import JsonObject, jsonable
from ensemble_ray.values.value import FrozenSequence, Value

if TYPE_CHECKING:
    from ensemble_ray.values.messages import ChatMessage
    from ensemble_ray.values.task_output import TaskOutput


class DelegationPriority(StrEnum):
    """The urgency of a delegation; it has no effect on scheduling."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"
    CRITICAL = "critical"


class DelegationStatus(StrEnum):
    """The outcome of a delegation."""

    SUCCESS = "success"
    FAILURE = "failure"
    PARTIAL = "partial"  # never of the built-in tools (S-DEL-32)


def _is_blank(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


class DelegationRequest(Value):
    """A task that one agent delegates to another.

    Attributes:
        task_id: Id of this delegation; a new UUID if omitted or blank. The response, events and log lines have the same id.
        agent_role: Role of the worker.
        task_description: The task.
        scope: Subject of the work, for policies.
        priority: A hint.
        expected_output_schema: Schema of the result, for policies.
        max_output_retries: Corrections of the result, for policies.
        metadata: Other data for policies.

    `replace` keeps the id.
    """

    task_id: Annotated[
        str,
        BeforeValidator(lambda value: str(uuid.uuid4()) if _is_blank(value) else value),
        Field(validate_default=True),
    ] = ""
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
                if _is_blank(arguments.get(name)):
                    raise ValidationError(f"DelegationRequest {name} must not be blank")
        return data

    @field_serializer("expected_output_schema", when_used="json")
    def _schema_as_json(self, value: object) -> object:
        return jsonable(value)


class DelegationResponse(Value):
    """The result of a delegation.

    Attributes:
        task_id: Id of the request.
        worker_role: Role of the worker.
        raw_output: The worker's text; None for a failure.
        parsed_output: None: built-in delegations have no output type.
        artifacts: Always empty for built-in delegations.
        errors: Texts of a failure; empty for a success.
        duration: Since the creation of the request.
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
    """The situation of a delegation, for policies."""

    delegating_agent_role: str  # `Manager` in a hierarchical run
    current_depth: int  # 0: by a task of the plan
    max_depth: int
    available_worker_roles: Sequence[str]


@dataclass(frozen=True, slots=True)
class DelegationPolicyResult:
    """The verdict of a policy; created by `allow`, `reject` and `modify`.

    Examples:
        >>> DelegationPolicyResult.reject("not today").reason
        'not today'
        >>> DelegationPolicyResult.allow() is DelegationPolicyResult.allow()
        True
    """

    _ALLOW: ClassVar[DelegationPolicyResult]

    verdict: Literal["allow", "reject", "modify"]
    reason: str = ""
    request: DelegationRequest | None = None

    @classmethod
    def allow(cls) -> DelegationPolicyResult:
        """Allow the request."""
        return cls._ALLOW

    @classmethod
    def reject(cls, reason: str) -> Self:
        """Reject the request; the delegating model receives the reason.

        Raises:
            ValueError: The reason is blank.
        """
        if reason is None or not reason.strip():
            raise ValueError("DelegationPolicyResult reason must not be blank")
        return cls("reject", reason=reason)

    @classmethod
    def modify(cls, request: DelegationRequest) -> Self:
        """Replace the request.

        Raises:
            ValueError: The request is None.
        """
        if request is None:
            raise ValueError("DelegationPolicyResult request must not be None")
        return cls("modify", request=request)


DelegationPolicyResult._ALLOW = DelegationPolicyResult("allow")  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  the class body cannot create its own instance


@runtime_checkable
class DelegationPolicy(Protocol):
    """Decides about delegations. A function with the same arguments is a policy, too."""

    def evaluate(
        self, request: DelegationRequest, context: DelegationPolicyContext, /
    ) -> DelegationPolicyResult | Awaitable[DelegationPolicyResult]:
        """Allow, reject or modify a request."""
        ...


PolicyFunction = Callable[
    [DelegationRequest, DelegationPolicyContext], DelegationPolicyResult | Awaitable[DelegationPolicyResult]
]


def spoken_role(role: str) -> str:
    """Normalize a role for the search of a worker (S-DEL-2, S-HIER-21)."""
    return role.strip().casefold()


class Peer(Struct, frozen=True, kw_only=True):
    """An agent that can receive delegated work."""

    key: str
    role: str
    is_streaming: bool = False  # unless the task says otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegationContext:
    """The settings of all delegations of a run; they travel with the run's frame."""

    peers: Sequence[Peer] = ()
    max_depth: int = 3  # S-DEL-11
    policies: Sequence[str] = ()  # names; the run's callables evaluate them
    timeout_s: float | None = None  # of one delegation
    most_at_once: int | None = None  # of a manager; None: no cap
    retries: int = 2  # after the death of its process

    def find(self, role: str) -> Peer | None:
        """Return the first agent with a role; case and spaces around it are ignored."""
        wanted = spoken_role(role)
        return next((each for each in self.peers if spoken_role(each.role) == wanted), None)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the peers, in order."""
        return tuple(each.role for each in self.peers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRequest:
    """A task for the runner of its agent.

    The messages are those that an agent with a model would send: role and goal, then the task with its context, memory
    and notes. For a correction they include the runner's earlier answer and the problem with it.
    """

    #: the system prompt first, the current question last, earlier messages between them
    messages: tuple[ChatMessage, ...]
    description: str
    expected_output: str
    agent_role: str
    context_outputs: tuple[TaskOutput, ...] = ()
    output_type: type[object] | None = None
    output_schema: Mapping[str, object] | None = None  # None: no type, or no schema that endpoints can enforce
    run_id: str = ""
    task: str = ""  # key in the plan, and path of this execution
    instance: str = ""
    attempt: int = 0  # 0-based number of the call by this task
    idempotency_key: str = ""  # different for each attempt; a resumed run repeats it
    is_streaming: bool = False

    @property
    def system_prompt(self) -> str:
        """The first message: the agent's role and goal."""
        return self.messages[0].content or ""

    @property
    def prompt(self) -> str:
        """The last message: the current question."""
        return self.messages[-1].content or ""

    @property
    def history(self) -> tuple[ChatMessage, ...]:
        """The messages between them."""
        return self.messages[1:-1]

    @property
    def text(self) -> str:
        """The whole conversation as one text, for agents that accept one text."""
        earlier = (f"{each.role.capitalize()}: {each.content or ''}" for each in self.history)
        return "\n\n".join(part for part in (self.system_prompt, *earlier, self.prompt) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAnswer:
    """The answer of a runner that has more than a text."""

    text: str = ""
    #: data or an object of the `output_type`; used if the task has one or the text is empty
    structured_output: object = None
    input_tokens: int = -1  # -1: unknown
    output_tokens: int = -1
    finish_reason: str | None = None  # as the model's provider reports it; `length`: the answer was cut off
