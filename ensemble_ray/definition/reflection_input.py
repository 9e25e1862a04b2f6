"""What a strategy of reflection is given. Package: definition."""

from __future__ import annotations

from pydantic import InstanceOf

from ensemble_ray.definition.task import Task
from ensemble_ray.values.reflection import TaskReflection
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.value import Value

__all__ = ["ReflectionInput"]


class ReflectionInput(Value):
    """What a `strategy` reflects on.

    Attributes:
        task: The task with its variables resolved. On a cluster it comes without what stays elsewhere: agent, tools, handler,
            guardrails, context.
        task_output: What it gave; after an edit at a review gate the edited output.
        prior_reflection: The newest reflection on the task; None: there is none yet.
    """

    task: InstanceOf[Task]
    task_output: InstanceOf[TaskOutput]
    prior_reflection: InstanceOf[TaskReflection] | None = None
