"""TokenCounts: how many tokens outputs have, as those who group them are told.

In: an output. Out: its tokens (S-MR-60), at once where they are known; the user's estimator is asked in a thread of ours,
one call at a time (S-MR-143). That tokens were guessed is said once per run.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ensemble_ray.definition.map_reduce import MapReduceDefinition
from ensemble_ray.plan.map_reduce_factories import estimate_tokens
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import threads

if TYPE_CHECKING:
    from ensemble_ray.definition.map_reduce import MapDefinition
    from ensemble_ray.values.task_output import TaskOutput

_log = bounded_logger(__name__)


class TokenCounts:
    """Tokens of the outputs of one run."""

    def __init__(self, definition: MapDefinition) -> None:
        """Weigh as the definition says; groups of a fixed size, and maps alone, weigh nothing."""
        reduced = definition if isinstance(definition, MapReduceDefinition) else None
        self._definition = reduced if reduced is not None and reduced.is_adaptive else None
        self._turn = asyncio.Lock()
        self._has_warned = False

    def count(self, output: TaskOutput) -> int | None:
        """Return its tokens; None where the user's estimator has to be asked."""
        definition = self._definition
        if definition is None:
            return 0
        if definition.token_estimator is not None and output.metrics.output_tokens < 0:
            return None
        return self._warn_once(*estimate_tokens(output, definition))

    async def ask(self, output: TaskOutput) -> int:
        """Return its tokens, from the estimator where the provider counted none.

        Raises:
            Exception: what the estimator raised; a ValidationError where it gave no number.
        """
        if self._definition is None:
            return 0
        async with self._turn:
            return self._warn_once(*await threads.run(estimate_tokens, output, self._definition))

    def _warn_once(self, tokens: int, warning: str | None) -> int:
        if warning is not None and not self._has_warned:
            self._has_warned = True
            _log.warning("%s. This is said once per run", warning)
        return tokens
