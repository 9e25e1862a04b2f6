"""Review gates: that somebody is asked, and what was decided. Pure.

A gate is named like an effect of its task: `draft#0/0/before-review`, `draft#0/0/after-review`, and for the second question of
a tool's call `draft#0/2/call-1-review-1`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ensemble_ray.facts.fact import FactData, Key
from ensemble_ray.facts.shapes import DURATION, FLAG, TEXT, one_of, optional
from ensemble_ray.values.reviews import OnTimeoutAction, OpenReview, ReviewAnswer, ReviewRequest, ReviewTiming
from ensemble_ray.values.value import utc_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewRequested(FactData):
    """Somebody is asked, from the time of the fact on; noted before anybody hears of it."""

    KIND: ClassVar = "review"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {
        "review_id": Key(TEXT, ""),
        "timing": Key(one_of(*ReviewTiming), ReviewTiming.AFTER_EXECUTION, read=ReviewTiming),
        "task_description": Key(TEXT, ""),
        "task_output": Key(TEXT, "", is_optional=True),
        "prompt": Key(optional(TEXT), is_optional=True),
        "timeout_s": Key(optional(DURATION), is_optional=True),
        "on_timeout": Key(one_of(*OnTimeoutAction), OnTimeoutAction.EXIT_EARLY, read=OnTimeoutAction),
        "required_role": Key(optional(TEXT), is_optional=True),
        "ends_run": Key(FLAG, default=True),
        "detached": Key(FLAG, default=False, is_optional=True),
    }

    #: id of the gate; unique in its store
    review_id: str
    timing: ReviewTiming
    task_description: str
    task_output: str = ""
    prompt: str | None = None
    #: how long it waits from the time of the fact on, s; None: without limit
    timeout_s: float | None = None
    on_timeout: OnTimeoutAction = OnTimeoutAction.EXIT_EARLY
    required_role: str | None = None
    #: whether `ExitEarly` ends the run, or only refuses a tool's call
    ends_run: bool = True
    #: whether its task was put down there (S-REV-115)
    detached: bool = False

    @classmethod
    def of(cls, request: ReviewRequest, *, detached: bool = False) -> ReviewRequested:
        """Return the fact of a request."""
        return cls(
            review_id=request.review_id,
            timing=request.timing,
            task_description=request.task_description,
            task_output=request.task_output,
            prompt=request.prompt,
            timeout_s=request.timeout_s,
            on_timeout=request.on_timeout,
            required_role=request.required_role,
            ends_run=request.ends_run,
            detached=detached,
        )

    def open_since(self, run_id: str, asked_at: float) -> OpenReview:
        """Return the gate as it stands until somebody decides.

        Args:
            run_id: Its run.
            asked_at: The time of the fact, Unix time, s.
        """
        return OpenReview(
            run_id=run_id,
            gate_id=self.review_id,
            task_description=self.task_description,
            task_output=self.task_output,
            timing=self.timing,
            prompt=self.prompt,
            created_at=utc_of(asked_at),
            expires_at=None if self.timeout_s is None else utc_of(asked_at + self.timeout_s),
            on_timeout=self.on_timeout,
            required_role=self.required_role,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewDecided(FactData):
    """Somebody decided at a gate, at the time of the fact."""

    KIND: ClassVar = "review_decision"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {
        "verdict": Key(one_of("approve", "edit", "exit"), "approve", is_needed=True),
        "text": Key(optional(TEXT), is_optional=True),
        "timed_out": Key(FLAG, default=False, is_optional=True),
        "by": Key(TEXT, ""),
        "comment": Key(TEXT, "", is_optional=True),
        "outside": Key(FLAG, default=False, is_optional=True),
    }

    #: `approve`, `edit` or `exit`
    verdict: str
    #: of an edit: the text that takes the place of the old one
    text: str | None = None
    #: of an exit: whether it follows from nobody having answered
    timed_out: bool = False
    #: the handler that was called, or the person
    by: str = ""
    comment: str = ""
    #: whether it was taken while nothing of its task ran, by somebody else than the run's own process (S-REV-117)
    outside: bool = False

    @classmethod
    def of(cls, answer: ReviewAnswer, *, comment: str = "", outside: bool = False) -> ReviewDecided:
        """Return the fact of an answer."""
        data = answer.to_data()
        return cls(
            verdict=str(data["verdict"]),
            text=None if "text" not in data else str(data["text"]),
            timed_out=bool(data.get("timed_out")),
            by=answer.by,
            comment=comment,
            outside=outside,
        )

    @property
    def answer(self) -> ReviewAnswer:
        """What was decided, and by whom."""
        data = {"verdict": self.verdict, "text": self.text or "", "timed_out": self.timed_out, "by": self.by}
        return ReviewAnswer.from_data(data)
