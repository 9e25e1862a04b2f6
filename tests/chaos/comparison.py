"""What a run that nobody disturbs gives, and where another one differs from it.

In: outputs, facts and dead letters of two runs of a scenario. Out: what is not the same, in words. Never: a comparison of
times and ids, which differ from run to run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from ensemble_ray.facts.fact import Fact
from tests.chaos.audit import difference
from tests.chaos.audit_delegations import decisions_in
from tests.chaos.audit_map_reduce import outcomes_in

__all__ = ["OUTPUT", "Undisturbed", "output_in"]

#: Where the output begins among what a program printed.
OUTPUT = '{\n  "'


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """What a run that nobody disturbs gives."""

    output: Mapping[str, object]
    #: what was decided of delegations, by call
    decisions: Mapping[str, object]
    #: of a map-reduce: what its tasks and its items gave
    tree: Mapping[str, object]
    has_own_shape: bool

    @classmethod
    def of(
        cls,
        output: Mapping[str, object],
        facts: Sequence[Fact],
        letters: Sequence[Mapping[str, Any]],
        *,
        has_own_shape: bool,
    ) -> Self:
        """What is compared of a run."""
        return cls(output, decisions_in(facts), outcomes_in(facts, letters, has_own_shape=has_own_shape), has_own_shape)

    def differences(
        self, output: Mapping[str, object], facts: Sequence[Fact], letters: Sequence[Mapping[str, Any]]
    ) -> list[str]:
        """Where another run is not the same."""
        found = self.of(output, facts, letters, has_own_shape=self.has_own_shape)
        return [
            *difference(self.output, output, has_own_shape=self.has_own_shape),
            *(
                f"'{name}' was decided as {found.decisions.get(name)} instead of {self.decisions.get(name)}"
                for name in sorted({*self.decisions, *found.decisions})
                if found.decisions.get(name) != self.decisions.get(name)
            ),
            *(
                f"{name} gave {found.tree.get(name)} instead of {self.tree.get(name)}"
                for name in sorted({*self.tree, *found.tree})
                if found.tree.get(name) != self.tree.get(name)
            ),
        ]


def output_in(text: str) -> Mapping[str, object]:
    """The output among what a program printed."""
    return cast("Mapping[str, object]", json.JSONDecoder().raw_decode(text[text.index(OUTPUT) :])[0])
