"""What an agent answers to a question. Layer: above outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, cast

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.values.messages import ChatMessage
from ensemble_ray.values.outputs import EnsembleOutput
from ensemble_ray.values.shown import Shown
from ensemble_ray.values.task_output import NOT_PARSED, Parsed_co
from ensemble_ray.values.value import FrozenSequence

if TYPE_CHECKING:
    from ensemble_ray.values.metrics import ExecutionMetrics
    from ensemble_ray.values.trace import ToolCallTrace

__all__ = ["AgentOutput"]


class AgentOutput(Shown, Generic[Parsed_co]):
    """What an agent answered to a question. Give it as `history=` to ask on.

    Attributes:
        output: The whole output of the run: metrics, trace, why it ended.
        messages: The conversation with this question and its answer: roles `user` and `assistant` in turns.
    """

    output: EnsembleOutput
    messages: FrozenSequence[ChatMessage] = ()

    def text_and_figures(self) -> tuple[str, str]:
        """Return the text, and the line of figures without its brackets."""
        return self.output.text_and_figures()

    @property
    def text(self) -> str:
        """The answer; "" when the run ended before there was one."""
        return self.output.raw

    @property
    def raw(self) -> str:
        """The same as `text`."""
        return self.output.raw

    @property
    def parsed(self) -> Parsed_co:
        """The answer as the `output_type` that was asked for.

        Raises:
            IllegalStateError: there is none.
        """
        answered = self.output.last_completed_output
        if answered is None:
            raise IllegalStateError(NOT_PARSED)
        return cast("Parsed_co", answered.parsed)

    @property
    def tool_calls(self) -> tuple[ToolCallTrace, ...]:
        """The tools that were called, in order, with arguments and results."""
        return tuple(
            call
            for traced in self.output.trace.task_traces
            for interaction in traced.llm_interactions
            for call in interaction.tool_calls
        )

    @property
    def metrics(self) -> ExecutionMetrics:
        """What the run took: model calls, tokens, times, costs."""
        return self.output.metrics

    @property
    def run_id(self) -> str | None:
        """The run's id, which names its record."""
        return self.output.run_id

    @property
    def is_complete(self) -> bool:
        """Whether there is an answer: the run did not end early."""
        return self.output.is_complete
