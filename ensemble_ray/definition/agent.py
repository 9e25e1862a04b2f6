"""An agent: who works, with which model and tools. Room: definition.

In: what the user declares. Out: a frozen value that travels to whoever runs its tasks. It never calls its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, cast

from pydantic import model_validator

from ensemble_ray.definition.fields import (
    ModelField,
    StrictInt,
    StrictText,
    ToolsField,
    changes_with_limit,
    check_positive,
    check_text,
    check_tools,
    initially,
    model_under_limit,
)
from ensemble_ray.definition.identity import Identified
from ensemble_ray.definition.model_placeholder import TEAM_MODEL
from ensemble_ray.errors import ValidationError
from ensemble_ray.limits.rate_limit import RateLimit
from ensemble_ray.messages import OnIncomplete

__all__ = ["Agent"]


class Agent(Identified):
    """A worker: a role, a goal, a model, and the tools it may call.

    One agent may serve many tasks and many runs at once; it is equal only to itself (S-CONV-31).

    Attributes:
        role: Who it is; shown in prompts, events and traces.
        goal: What it works towards.
        background: Experience and manner, told to the model after the role.
        tools: `@tool` functions, objects with `@tool` methods, `AgentTool`s, `DynamicToolProvider`s. Without tools a
            task is one model call.
        llm: Its model, or a string such as `"openai:gpt-4o-mini"` or `"local"`; left out: that of the ensemble it runs in.
        stream: Whether answers stream; None: as the task, then the ensemble say.
        verbose: Whether prompts and answers are logged at INFO.
        max_iterations: Tool requests allowed per task; > 0.
        response_format: Instructions on the form of the answer, put at the end of the system prompt.
        allow_delegation: Whether it may hand work to the ensemble's other agents, by a tool named `delegate`.
        rate_limit: Limit of this agent's model calls, kept across runs; `llm` is then the limited model.
        max_concurrency: Tasks it works on at the same time in one process; None: no cap.
        replicas: Processes that host it on Ray; its tools' state is then one copy per process.
        on_incomplete: What becomes of an answer that was cut off or is empty: `"warn"`: it is used, with a warning;
            `"fail"`: the task fails; `"retry"`: the model is asked again, twice at most, then the task fails; None: as
            the ensemble says.
        isolation: `"process"`: always a process of its own on Ray; `"shared"`: never one; None: the runtime decides.
    """

    role: StrictText
    goal: StrictText
    background: StrictText | None = None
    tools: ToolsField = initially(())
    llm: ModelField = initially(TEAM_MODEL)
    stream: bool | None = None
    verbose: bool = False
    max_iterations: StrictInt = 25
    response_format: StrictText = ""
    on_incomplete: OnIncomplete | None = None
    allow_delegation: bool = False
    rate_limit: RateLimit | None = None
    max_concurrency: StrictInt | None = None
    replicas: StrictInt = 1
    isolation: Literal["process", "shared"] | None = None

    __hash__ = Identified.__hash__  # type checkers take a value class to be unhashable unless it says so itself

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        """The table of checks (S-DOM-1 to S-DOM-8); a missing role or goal counts as None (S-CONV-13)."""
        if not isinstance(data, Mapping):
            return data
        given = dict(cast("Mapping[str, Any]", data))
        check_text(given.get("role"), "Agent role must not be blank")
        check_text(given.get("goal"), "Agent goal must not be blank")
        if given.setdefault("llm", TEAM_MODEL) is None:
            raise ValidationError("Agent llm must not be None")
        check_positive(given.get("max_iterations"), "Agent max_iterations must be > 0")
        given["tools"] = check_tools(given.get("tools"), subject="Tool")
        check_positive(given.get("max_concurrency"), "Agent max_concurrency must be > 0 when set")
        check_positive(given.get("replicas"), "Agent replicas must be > 0")
        if given.get("response_format", "") is None:
            given["response_format"] = ""
        given["llm"] = model_under_limit(given)
        return given

    def replace(self, **changes: object) -> Self:
        """A copy with these fields changed, checked like a new one; it is another agent with an id of its own.

        A new `rate_limit` takes the place of the old one.

        Raises:
            ValidationError: a field is unknown or its value is refused.
        """
        return super().replace(**changes_with_limit(self.llm, self.rate_limit, changes))
