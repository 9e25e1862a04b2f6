"""Count the tool calls with an unknown outcome in a run of many tasks (S-DUR-26). Pure.

Calls with a known result use no memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

from ensemble_ray.execute.tools.unknown import HANDLER, RUNNER
from ensemble_ray.facts.effects import OutcomeDecided, ToolIntended, ToolReturned
from ensemble_ray.facts.fact import Fact, kinds_of
from ensemble_ray.facts.runs import ExitRecorded, ReviewRequested
from ensemble_ray.record.view.tree import TreeRow, row_text
from ensemble_ray.record.work import NO_RESULT
from ensemble_ray.values.ids import task_instance

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RunStore

UNKNOWN_KINDS = kinds_of(ToolIntended, ToolReturned, ExitRecorded)
_MOST_SHOWN = 20  # Calls that are listed; all of them are counted.
_TITLE = 72


class UnknownOutcomes:
    def __init__(self) -> None:
        self._open: dict[str, ToolIntended] = {}  # intents without a result, by name
        self._settled: Counter[str] = Counter()
        self._shown: dict[str, str] = {}

    def apply(self, fact: Fact) -> None:
        match fact.data:
            case ToolIntended() as intent:
                self._open[fact.name] = intent
            case ToolReturned() as result:
                asked = self._open.pop(fact.name, None)
                if result.is_unknown:
                    self._settled[_key_of(fact.name)] += 1
                    if len(self._shown) < _MOST_SHOWN:
                        self._shown[fact.name] = _call(asked, result.text)
            case ExitRecorded(call=call):
                self._open.pop(call, None)
            case _:
                pass

    def counts(self, is_over: Callable[[str], bool]) -> Counter[str]:
        """Return the number of calls by the key of their task. Open calls of a task count when it is over."""
        return self._settled + Counter(key for key in map(_key_of, self._open) if is_over(key))

    def describe(self, is_over: Callable[[str], bool]) -> dict[str, str]:
        shown = dict(self._shown)
        for name, asked in self._open.items():
            if len(shown) < _MOST_SHOWN and is_over(_key_of(name)):
                shown[name] = _call(asked, NO_RESULT)
        return shown

    def rows(self, is_over: Callable[[str], bool]) -> Iterator[TreeRow]:
        shown = self.describe(is_over)
        for name, text in shown.items():
            title = f"{row_text(_key_of(name), _TITLE)}: {text}"
            yield TreeRow(depth=1, kind="tool", title=title, details=("unknown",), is_bad=True)
        more = self.counts(is_over).total() - len(shown)
        if more > 0:
            yield TreeRow(depth=1, kind="tool", title=f"and {more:,} more of unknown outcome", is_bad=True)


async def read_begun_work(store: RunStore, run_id: str) -> dict[str, Fact[ToolIntended]]:
    """Return the calls of handlers and runners of effect `once` that have no result, by the name of the effect."""
    begun: dict[str, Fact[ToolIntended]] = {}
    async for page in store.read(run_id, kinds=kinds_of(ToolIntended)):
        for fact in page:
            intent = cast("Fact[ToolIntended]", fact)
            if intent.data.effect == "once" and fact.name.rpartition("/")[2] in {HANDLER, RUNNER}:
                begun[fact.name] = intent
    if begun:
        # A handler with a detached review is called again, whichever effect it declares (S-REV-117).
        async for page in store.read(
            run_id, kinds=kinds_of(ToolReturned, OutcomeDecided, ReviewRequested), has_data=False
        ):
            for fact in page:
                name = fact.name.partition("-review")[0] if isinstance(fact.data, ReviewRequested) else fact.name
                if name in begun and fact.seq > begun[name].seq:
                    del begun[name]
    return begun


def _key_of(name: str) -> str:
    return task_instance(name).rpartition("#")[0]


def _call(asked: ToolIntended | None, text: str) -> str:
    tool, arguments = ("?", "?") if asked is None else (asked.tool_name, asked.arguments)
    return f"{row_text(tool, _TITLE)}({row_text(arguments, _TITLE)}) -> {row_text(text, _TITLE)}"
