"""Decodes stored facts; facts of unknown kinds, from a later version, are preserved unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from ensemble_ray.facts import effects, runs
from ensemble_ray.facts.fact import INSTANT, NUMBER, TEXT, Fact, FactData, require

KINDS: Mapping[str, type[FactData]] = {
    each.KIND: each
    for each in (*vars(effects).values(), *vars(runs).values())
    if isinstance(each, type) and issubclass(each, FactData) and each.KIND
}
#: A store finds these fast, regardless of the number of facts.
KINDS_OF_RUN = frozenset(name for name, each in KINDS.items() if each.IS_OF_RUN)


class UnknownFact(FactData, kw_only=True):
    kind_name: str
    values: Mapping[str, object]

    @property
    def kind(self) -> str:
        return self.kind_name

    def to_data(self) -> dict[str, object]:
        return dict(self.values)

    @classmethod
    def from_data(cls, data: Mapping[str, object], at: float) -> Self:
        """Wrap the values; the caller sets the kind."""
        del at
        return cls(kind_name="", values=data)


def read_fact(
    *, run: str, kind: str, name: str, at: float, data: Mapping[str, object], epoch: int = 0, seq: int = 0
) -> Fact:
    """Decode a fact; a `ValueError` names the invalid value."""
    require("kind", kind, TEXT)
    require("name", name, TEXT)
    require("at", at, INSTANT)
    require("epoch", epoch, NUMBER)
    found = KINDS.get(kind)
    read = UnknownFact(kind_name=kind, values=data) if found is None else found.from_data(data, at)
    return Fact(run=run, name=name, at=at, data=read, epoch=epoch, seq=seq)
