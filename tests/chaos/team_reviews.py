"""A detached team that is killed, and the person who decides at its gates. See `teams` for what it is made of.

The person decides when the run waits, at gates by lot, and lets it go on: so several are open at a time, are decided in any
order, and the run comes back to those that are left.
"""

from __future__ import annotations

import random

from ensemble_ray import AbstractAgentTool, Ensemble, OpenReview, Review, ReviewDecision, Task, ToolResult
from ensemble_ray.record.stores import RunStore
from ensemble_ray.recovery.deciding import record_decision
from tests.chaos.teams import join, leave, make_agent, make_task

__all__ = ["decide_some", "decision_of", "reviewed"]

_GATE = Review(prompt="Is it right?", timeout=0)


class Sign(AbstractAgentTool):
    """Asks, asks again, and signs once; doing it twice would show."""

    name = "sign"
    description = "Signs."
    effect = "once"

    def do_execute(self, text: str, /) -> ToolResult:
        """Sign, where two people let it."""
        path, _, name = text.partition("|")
        for question in (f"Sign {name}?", f"Really sign {name}?"):
            if isinstance(self.request_approval(question, timeout=0), ReviewDecision.ExitEarly):
                return ToolResult.failure("refused")
        leave(path, tool="append_line", key=self.context.idempotency_key, text=f"signed {name}")
        return ToolResult.success(f"signed {name}")


def reviewed() -> Ensemble:
    """Four lines side by side with gates of every timing, and what needs them all."""
    signing = [make_agent(f"Signer {number}", isolation="process") for number in range(2)]
    signing = [agent.replace(tools=[*agent.tools, Sign()]) for agent in signing]
    plain = make_agent("Walker")
    first = make_task("a", plain, [], review=_GATE)
    signed = [make_task(f"sign{number}", agent, []) for number, agent in enumerate(signing)]
    second = make_task("b", plain, [first], before_review=_GATE)
    handled: Task = make_task("h", None, [signed[0]], handler=join, effect="once", before_review=_GATE, review=_GATE)
    last = make_task("z", plain, [second, signed[1], handled], review=_GATE)
    return Ensemble(tasks=[first, *signed, second, handled, last], workflow="parallel", review_wait="detach")


def decision_of(review: OpenReview) -> ReviewDecision:
    """What is decided at a gate; it follows from the gate alone, so every run gets the same."""
    if review.task_output and len(review.task_output) % 2:
        return ReviewDecision.edit(f"{review.task_output}, edited")
    return ReviewDecision.continue_execution()


async def decide_some(store: RunStore, run_id: str, reviews: list[OpenReview], turn: int, *, most: int) -> int:
    """Decide at some of the open gates of a run, by lot; gives at how many."""
    rng = random.Random(f"{run_id}/{turn}")  # noqa: S311  keeps no secret
    chosen = rng.sample(reviews, rng.randint(1, min(most, len(reviews))))
    for each in chosen:
        await record_decision(store, run_id, each.gate_id, decision_of(each), by="chaos", comment=None)
    return len(chosen)
