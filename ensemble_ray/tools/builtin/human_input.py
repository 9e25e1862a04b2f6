"""Asks a person what a model wants to know (S-REV-50 to S-REV-54). Package: tools. In: the question; out: the answer."""

from __future__ import annotations

from datetime import timedelta

from ensemble_ray.errors import ExitEarlyError, ValidationError
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.tools.approval import approval_request, ask
from ensemble_ray.tools.tool import AbstractAgentTool, ToolResult
from ensemble_ray.values.reviews import Edit, ExitEarly, OnTimeoutAction, Review

__all__ = ["HumanInputTool"]

_log = bounded_logger(__name__)
_NOBODY = "No reviewer is available. Please proceed with your best judgment."


class HumanInputTool(AbstractAgentTool):
    """Asks the run's review handler; the answer of a person is recorded, and a resumed run does not ask again.

    Args:
        timeout: How long an answer may take, a `timedelta` or seconds; 0: as long as it takes.
        on_timeout: What follows when nobody answered: `"continue"`, `"exit_early"` or `"fail"`.

    Raises:
        ValidationError: the timeout is negative, or the action is none.
    """

    name = "human_input"
    description = (
        "Asks a person a question and gives the answer. Use it when you need a decision, an opinion or a fact that only "
        "a person has. The input is the question."
    )
    timeout = None  # the time is a person's
    effect = "idempotent"  # an answer that was recorded is not asked for again

    def __init__(
        self,
        timeout: timedelta | float = Review.DEFAULT_TIMEOUT,
        on_timeout: OnTimeoutAction | str = OnTimeoutAction.CONTINUE,
    ) -> None:
        actions = [each.value for each in OnTimeoutAction]
        if on_timeout not in actions:
            raise ValidationError(f"HumanInputTool on_timeout must be one of {actions}, got: {on_timeout!r}")
        self._review = Review(timeout=timeout, on_timeout=on_timeout)

    async def do_execute(self, text: str, /) -> ToolResult:
        """Ask."""
        handler = self.context.review_handler
        if handler is None:
            _log.warning("Tool '%s' has nobody to ask: the run has no review_handler", self.name)
            return ToolResult.success(_NOBODY)
        request = approval_request(
            text, timeout=self._review.timeout, on_timeout=self._review.on_timeout, ends_run=True
        )
        match await ask(handler, request):
            case Edit(revised_output=answer):
                return ToolResult.success(answer)
            case ExitEarly(timed_out=timed_out):
                raise ExitEarlyError("The run was ended by the person who was asked", timed_out)
            case _:
                return ToolResult.success("Understood. Please continue.")
