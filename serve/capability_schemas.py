"""What an endpoint can do, and calls of its tools, as they travel over HTTP."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from ensemble_ray.serve.schemas import Data, Expressible, Text, Wire


class ToolInfo(Wire):
    """A tool that can be called.

    Attributes:
        parameters: JSON schema of its arguments.
    """

    name: str
    description: Text
    parameters: Data


class TaskInfo(Wire):
    """A task of a team.

    Attributes:
        agent_role: Who does it; in brackets where that is not an agent that the team declares.
    """

    ensemble: str
    name: str
    agent_role: Text


class ModelInfo(Wire):
    """A model that runs of a team can be told to ask."""

    ensemble: str
    name: str


class Capabilities(Wire):
    """Answer to `GET /capabilities`.

    Attributes:
        tasks: Of the teams whose tasks are known before they run.
    """

    tools: list[ToolInfo]
    models: list[ModelInfo]
    tasks: list[TaskInfo]


class ToolCallBody(Wire):
    """Body of `POST /tools/{name}/invoke`.

    Attributes:
        arguments: As a model would send them.
    """

    arguments: Annotated[dict[str, JsonValue], Expressible] = Field(default_factory=dict)


class ToolReply(Wire):
    """What a call gave.

    Attributes:
        outcome: `failure`: the tool said no; `error`: it raised, or its arguments do not fit.
        output: What a model would read.
    """

    name: str
    outcome: Literal["success", "failure", "error"]
    output: Text
    duration_s: float
