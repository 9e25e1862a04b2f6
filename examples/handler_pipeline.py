"""Tasks without a model: functions and a pipeline of tools. A model only writes the last sentence.

python examples/handler_pipeline.py [LLM]
"""

from __future__ import annotations

import sys

from pydantic import BaseModel

from ensemble_ray import (
    AbstractAgentTool,
    Agent,
    CalculatorTool,
    Ensemble,
    EnsembleOutput,
    Task,
    TaskHandlerContext,
    ToolPipeline,
    ToolResult,
)


class Measured(BaseModel):
    """A tide as a gauge reports it."""

    place: str
    high_m: float
    low_m: float


def fetch(_: TaskHandlerContext) -> dict[str, object]:
    """Replace a call of a service; a handler may be `async` and may raise."""
    return {"gauges": [{"place": "Brest", "high_m": 6.9, "low_m": 1.4}]}


def measure(context: TaskHandlerContext) -> Measured:
    """Read the output of the previous task: handlers receive the object, models its JSON."""
    return Measured(**context.context_outputs[0].parsed["gauges"][0])


class Difference(AbstractAgentTool):
    """Writes the range of a tide as an expression."""

    name = "difference"
    description = "Makes of a tide the expression of its range"

    def do_execute(self, text: str, /) -> ToolResult:
        """Read the tide. An invalid input raises, and the task fails with that message."""
        tide = Measured.model_validate_json(text)
        return ToolResult.success(f"{tide.high_m} - {tide.low_m}")


def main(llm: str = "openai:gpt-4o-mini") -> EnsembleOutput:
    fetched = Task(name="fetch", description="Fetch the gauges", expected_output="JSON", handler=fetch)
    measured = Task(
        name="measure",
        description="Read the first gauge",
        expected_output="A tide",
        handler=measure,
        context=[fetched],
        output_type=Measured,
    )
    # A tool or a pipeline of tools is a handler too. Its input is the text of the last context task.
    computed = Task(
        name="range",
        description="Compute the range",
        expected_output="Metres",
        handler=ToolPipeline.of(Difference(), CalculatorTool()),
        context=[measured],
    )
    written = Task(
        name="sentence",
        description="Say in one sentence how far the sea falls in Brest",
        expected_output="One sentence",
        agent=Agent(role="Writer", goal="Write plainly", llm=llm),
        context=[measured, computed],
    )
    output = Ensemble(tasks=[fetched, measured, computed, written]).run()
    for task in (measured, computed, written):
        found = output.get_output(task)
        print(f"{task.name}: {found.raw if found is not None else '-'}")
    return output


if __name__ == "__main__":
    main(*sys.argv[1:2])
