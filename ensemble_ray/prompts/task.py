"""The user prompt: what to do, after what. Package: prompts. In: a resolved task and outputs. Out: text."""

from __future__ import annotations

from collections.abc import Sequence

from ensemble_ray.definition.task import Task
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.prompts.context import context_part, context_section, warn_of_long_outputs
from ensemble_ray.prompts.memory import memory_sections, scope_sections, short_term_section
from ensemble_ray.prompts.reflection import improvement_section
from ensemble_ray.prompts.sections import PromptPart, render_parts
from ensemble_ray.values.memory import RecalledMemory
from ensemble_ray.values.reflection import TaskReflection
from ensemble_ray.values.task_output import TaskOutput

__all__ = ["build_user_prompt", "context_section", "fixed_parts", "user_prompt_parts"]

_log = bounded_logger(__name__)

_REVISION = "A previous attempt at this task was not accepted. Take the feedback into account."


def build_user_prompt(
    task: Task,
    context_outputs: Sequence[TaskOutput] = (),
    memory: RecalledMemory | None = None,
    notes: TaskReflection | None = None,
    directives: Sequence[str] = (),
) -> str:
    """Memory, context, improvement notes, revision notes, directives, the task, the expected output and the output format.

    Sections without content are left out.

    Args:
        task: With its variables resolved.
        context_outputs: Outputs of its context tasks, in the order of its context list.
        memory: What it is reminded of; where short-term memory is on, that stands in place of the context.
        notes: What earlier runs learned of it.
        directives: What people told the run while it goes on.
    """
    if memory is None or memory.short_term is None:
        warn_of_long_outputs(context_outputs)
    prompt = render_parts(user_prompt_parts(task, context_outputs, memory, notes, directives))
    _log.debug("User prompt built: %d characters", len(prompt))
    return prompt


def user_prompt_parts(
    task: Task,
    context_outputs: Sequence[TaskOutput] = (),
    memory: RecalledMemory | None = None,
    notes: TaskReflection | None = None,
    directives: Sequence[str] = (),
) -> list[PromptPart]:
    """Return what the prompt of `build_user_prompt` is made of: sections that a context budget may cut, and the rest."""
    short_term = None if memory is None else memory.short_term
    sections = [*scope_sections(memory)]
    if short_term is not None:
        sections.append(short_term_section(short_term))
    elif context_outputs:
        sections.append(context_part(context_outputs))
    sections += memory_sections(memory)
    if notes is not None:
        sections.append(improvement_section(notes))
    return [*[section for section in sections if section.pieces], *fixed_parts(task, directives)]


def fixed_parts(task: Task, directives: Sequence[str] = ()) -> list[str]:
    """Return what no context budget cuts: what the task itself says, and what people told its run."""
    parts = [
        _revision_section(task),
        _directives_section(directives),
        f"## Task\n{task.description}",
        f"## Expected Output\n{task.expected_output}",
        _format_section(task),
    ]
    return [part for part in parts if part]


def _revision_section(task: Task) -> str:
    """Return what was wrong with the previous attempt (S-TPL-36)."""
    feedback = task.revision_feedback
    if feedback is None or not feedback.strip():
        return ""
    attempt = f" (Attempt {task.attempt_number + 1})" if task.attempt_number > 0 else ""
    lines = [f"## Revision Instructions{attempt}", _REVISION, "", "### Feedback", feedback]
    previous = task.prior_attempt_output
    if previous is not None and previous.strip():
        lines += ["", "### Previous Output", previous]
    return "\n".join(lines)


def _directives_section(directives: Sequence[str]) -> str:
    """Return what people told the run (S-TPL-57); further lines of one are indented, so that each is one entry of the list."""
    if not directives:
        return ""
    entries = ["- " + text.strip().replace("\n", "\n  ") for text in directives]
    return "\n".join(["## Active Directives", *entries])


def _format_section(task: Task) -> str:
    if task.output_type is None:
        return ""
    from ensemble_ray.prompts.output_format import output_format_section  # only typed tasks need schemas

    return output_format_section(task.output_type)
