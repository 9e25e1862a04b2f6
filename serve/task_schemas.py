"""How one run's tasks differ from its team's, as it travels over HTTP (S-CTL-20 to S-CTL-26)."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from ensemble_ray.serve.schemas import Wire
from ensemble_ray.text.foreign_text import whole_data

#: Tasks that one request may name.
MOST_TASKS = 200
_LONGEST_NAME, _LONGEST_TEXT, _MOST_TOOLS = 256, 100_000, 100

TaskName = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME), BeforeValidator(whole_data)]
_Template = Annotated[str, Field(min_length=1, max_length=_LONGEST_TEXT, pattern=r"\S"), BeforeValidator(whole_data)]
_Tools = Annotated[list[TaskName], Field(max_length=_MOST_TOOLS)]


class TaskOverride(Wire):
    """What is different of a task in this run; what is null is as the team says.

    Attributes:
        description: What to do; a template, as in the team.
        expected_output: What the result looks like; a template.
        model: Name of a model of `GET /capabilities`.
        tools: Names of tools of `GET /capabilities`, in place of those that it has.
    """

    description: _Template | None = None
    expected_output: _Template | None = None
    model: TaskName | None = None
    tools: _Tools | None = None


class NewTask(Wire):
    """A task that the team does not have.

    Attributes:
        name: What others call it; may be left out.
        description: What to do; a template, as in the team.
        expected_output: What the result looks like; a template.
        agent: Role of an agent of the team; null: one is made for it.
        model: Name of a model of `GET /capabilities`.
        tools: Names of tools of `GET /capabilities`.
        context: Names of tasks of the list whose outputs it is given.
    """

    name: TaskName | None = None
    description: _Template
    expected_output: _Template | None = None
    agent: TaskName | None = None
    model: TaskName | None = None
    tools: _Tools | None = None
    context: Annotated[list[TaskName], Field(max_length=MOST_TASKS)] = Field(default_factory=list)


#: By the tasks' names.
TaskOverrides = Annotated[dict[TaskName, TaskOverride], Field(max_length=MOST_TASKS)]
#: Names of the team's tasks, and new ones.
TaskSelection = Annotated[list[TaskName | NewTask], Field(min_length=1, max_length=MOST_TASKS)]
