"""A kill as it happened, or a freeze that is one in effect, and what it explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ensemble_ray.facts.fact import Fact

__all__ = ["Kill", "all_slipped"]

#: What a process sent before it was killed is read by the server as late as this, on a machine that is busy, s.
_READ_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill as it happened."""

    victim: str
    #: Unix time, s, just before the signal
    at: float
    #: whether model calls that were on their way may be made again
    repeats_calls: bool
    #: what the anchor was, to repeat it
    when: str
    #: keys that the record held when nothing could be written any more, each with how often it had been asked for by
    #: then; empty where the run went on
    settled: Mapping[str, int] = field(default_factory=dict[str, int])
    #: when its successor took over; agents that outlive a scheduler go on until then, and start over with it
    until: float = 0.0
    #: whether it was not dead, and woke when others had gone on with the run; gone for good at `until`
    is_zombie: bool = False

    #: whether a part of the record was lost with it, and somebody allowed that
    is_loss: bool = False

    def lasting_until(self, facts: Sequence[Fact]) -> Kill:
        """This kill, with the time at which a new owner went on with the run."""
        taken = min((fact.at for fact in facts if fact.kind == "resume" and fact.at > self.at), default=self.at)
        return replace(self, until=max(self.until, taken))

    def lets_slip(self, arrived_at: float) -> bool:
        """Whether a request of that time can be the one that a process sends before it learns that it was replaced."""
        return self.is_zombie and self.at < arrived_at < self.until + _READ_S

    def explains(self, begun_at: float, again_at: float) -> bool:
        """Whether what was begun then could have been under way in it, and was begun again after it."""
        return self.repeats_calls and begun_at < max(self.at, self.until) + _READ_S and self.at < again_at


def all_slipped(arrived_at: Sequence[float], kills: Sequence[Kill]) -> bool:
    """Whether all of these requests can be such ones."""
    return all(any(kill.lets_slip(at) for kill in kills) for at in arrived_at)
