"""What the page may do, and what it is told before. Pure."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ensemble_ray.studio.schemas.wire import Argument, StudioSchema, Text


class Decision(StudioSchema):
    """Body of `POST api/studio/reviews/RUN/GATE`.

    Attributes:
        text: Of an edit: what takes the place of the old text; it may be empty.
    """

    decision: Literal["approve", "edit", "exit"]
    text: str | None = None
    comment: str = ""


class NewFork(StudioSchema):
    """Body of `POST api/studio/runs/ID/fork`.

    Attributes:
        from_: The step to do again, as `fork_spec` of a step says it.
        run_id: Name of the new run; null: it gets one.
    """

    from_: Argument = Field(validation_alias="from", min_length=1, max_length=1000)
    run_id: str | None = Field(default=None, min_length=1, max_length=128)


class AcceptedAction(StudioSchema):
    """Answer 202: the run that goes on, ends or begins."""

    run_id: str


class PreviewedStep(StudioSchema):
    """A step of a run that would go on."""

    step: str
    title: Text


class PreviewedCall(StudioSchema):
    """A call of which nobody knows whether it was done."""

    step: str
    tool: Text
    arguments: Text


class RunPreview(StudioSchema):
    """What a resumed or forked run would take from the record, and what it would do again.

    Attributes:
        reused: Steps whose outputs come from the record.
        asked_again: Steps that were begun, and are done again or to their end; of a fork, all from its step on.
        unknown_effects: Calls that a person has to decide of before.
        blocked: Why it cannot be done; null: it can.
    """

    reused: list[PreviewedStep] = Field(default_factory=list[PreviewedStep])
    asked_again: list[PreviewedStep] = Field(default_factory=list[PreviewedStep])
    unknown_effects: list[PreviewedCall] = Field(default_factory=list[PreviewedCall])
    blocked: Text | None = None
