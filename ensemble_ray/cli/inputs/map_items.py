"""Items are looked at before a run over them begins: the first one, or all of them for estimates. Package: cli.

In: a definition. Out: a refusal, or numbers. Never: a model call, a record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ensemble_ray.cli.map_team import MapTeam, prompt_of
from ensemble_ray.cli.view.terminal import count_noun
from ensemble_ray.errors import ValidationError
from ensemble_ray.items.pulling import RefusedItem
from ensemble_ray.items.results import refuse_old_rows
from ensemble_ray.items.sources import NO_ITEMS
from ensemble_ray.map_reduce import MapReduceEnsemble
from ensemble_ray.process.loop import run_blocking
from ensemble_ray.prompts.agent import build_system_prompt
from ensemble_ray.prompts.task import build_user_prompt
from ensemble_ray.record.head import read_head
from ensemble_ray.text.token_estimate import CHARACTERS_PER_TOKEN

if TYPE_CHECKING:
    from ensemble_ray.items.pulling import ItemEntry

__all__ = ["check_begin", "estimate", "estimate_lines"]

#: Items whose prompts are looked at, and items that are read at a time.
_SAMPLE, _AT_ONCE = 100, 1000


def check_begin(team: MapTeam, run_id: str) -> None:
    """Let a run begin if its items can be read, the first one has what the prompt names, and the rows have a place.

    Rows in that place may be those of a recorded run of that id, which gives them again (S-MR-186).

    Raises:
        ValidationError: not so.
    """
    if team.results is not None and not _has_written(run_id, team):
        refuse_old_rows(team.results)
    entries = run_blocking(_read(team, 1))
    if not entries:
        raise ValidationError(f"{NO_ITEMS}: {team.item_source.place} has none")
    first = entries[0]
    if team.item_source.identity["kind"] == "dead_letters":
        return  # it may be there because of that, and others are not
    if isinstance(first, RefusedItem) and first.read is not None:
        raise first.error


def _has_written(run_id: str, team: MapTeam) -> bool:
    """Whether a run of that id is recorded whose rows go to the same file."""
    from ensemble_ray.cli.inputs.records import own_store  # a dry run has no use for it

    store = own_store()
    if run_blocking(store.summary(run_id)) is None:
        return False
    recorded = run_blocking(read_head(store, run_id)).source.overrides
    return recorded.get("output") == team.source.overrides.get("output")


def estimate(team: MapTeam) -> dict[str, Any]:
    """Return what a run would read and cost, as JSON data."""
    sample = run_blocking(_read(team, _SAMPLE))
    prompts = [_prompt(team, entry[1]) for entry in sample if not isinstance(entry, RefusedItem)]
    count, refused = run_blocking(_count(team))
    mean = sum(len(prompt) for prompt in prompts) / CHARACTERS_PER_TOKEN / max(1, len(prompts))
    tokens = round(mean * (count - refused))
    costs = team.cost_configuration
    money = None if costs is None else costs.estimate(tokens, 0)
    return {
        "items": count,
        "refused": refused,
        "source": team.item_source.place,
        "reduces": isinstance(team, MapReduceEnsemble),
        "first_prompt": prompts[0] if prompts else None,
        "input_tokens": tokens,
        "input_cost": None if money is None else float(money.input_cost),
        "currency": None if costs is None else costs.currency,
    }


def estimate_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the same as text."""
    lines = [f"{count_noun(found['items'], 'item')} in {found['source']}"]
    if found["refused"]:
        lines.append(f"  {found['refused']:,} of them cannot be asked about: they are no JSON, or lack a field")
    if found["first_prompt"] is not None:
        lines += ["", "First prompt", *(f"  {line}".rstrip() for line in found["first_prompt"].splitlines()), ""]
    cost = "" if found["input_cost"] is None else f", about {found['input_cost']:.4f} {found['currency']} of input"
    lines.append(
        f"About {found['input_tokens']:,} tokens of input{cost}{'; reduces come on top' if found['reduces'] else ''}"
    )
    lines.append("No model was called.")
    return lines


def _prompt(team: MapTeam, item: object) -> str:
    task = prompt_of(team)(item)
    system = "" if task.agent is None else f"{build_system_prompt(task.agent)}\n\n"
    return f"{system}{build_user_prompt(task)}"


async def _read(team: MapTeam, count: int) -> list[ItemEntry]:
    """Return the first entries; fewer where there are no more."""
    reader = team.item_source.reader()
    entries: list[ItemEntry] = []
    try:
        while len(entries) < count:
            pulled = await reader.next(count - len(entries))
            entries += pulled.items
            if pulled.is_exhausted:
                break
    finally:
        await reader.close()
    return entries


async def _count(team: MapTeam) -> tuple[int, int]:
    """Return (entries, those that are refused): an estimate before any cost is worth reading all of them."""
    reader = team.item_source.reader()
    count = refused = 0
    try:
        while True:
            pulled = await reader.next(_AT_ONCE)
            count += len(pulled.items)
            refused += sum(isinstance(entry, RefusedItem) for entry in pulled.items)
            if pulled.is_exhausted:
                return count, refused
    finally:
        await reader.close()
