"""What an endpoint allows: runs per team, and what one run may use. Pure."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ensemble_ray import RunOptions
from ensemble_ray.serve.datasets import DatasetCatalog
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.run_schemas import ItemsDataset, ItemsFile, NewRun
from ensemble_ray.teamfile import Runnable

N = TypeVar("N", int, float)


class EndpointLimits(BaseModel):
    """Bounds of an endpoint (S-SRV-50).

    Attributes:
        max_running: Runs of one team at the same time.
        max_queued: Runs of one team that wait for their turn; more are refused with 429.
        max_items: Items that one request may bring.
        max_tokens: Tokens that a run may spend, whatever its request says; None: as the team says.
        max_cost: Money that a run may spend, the same.
        items_directory: Where files of items lie that requests may name; None: they may name none.
        kept_runs: Runs that are kept in lists after their end; older ones are known by their records alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_running: int = Field(default=100, gt=0)
    max_queued: int = Field(default=1000, ge=0)
    max_items: int = Field(default=10_000, gt=0)
    max_tokens: int | None = Field(default=None, gt=0)
    max_cost: float | None = Field(default=None, gt=0)
    items_directory: Path | None = None
    kept_runs: int = Field(default=10_000, gt=0)


def options_of(asked: NewRun, definition: Runnable, limits: EndpointLimits) -> RunOptions:
    """Return the options of a run.

    Raises:
        Refusal: the request asks for more than the team or the operator allows.
    """
    wanted = asked.options
    tokens = _bound("max_tokens", wanted.max_tokens, (limits.max_tokens, definition.max_tokens))
    wanted_cost = None if wanted.max_cost is None else float(wanted.max_cost)
    cost = _bound("max_cost", wanted_cost, (limits.max_cost, definition.max_cost))
    if cost is not None and definition.cost_configuration is None and definition.max_cost is None:
        if wanted.max_cost is not None:
            raise _too_much("max_cost needs a team with a cost configuration")
        cost = None
    parallel = _bound("max_parallel_tasks", wanted.max_parallel_tasks, (definition.max_parallel_tasks,))
    return RunOptions(max_tokens=tokens, max_cost=cost, max_parallel_tasks=parallel, tags=asked.tags or None)


def _bound(name: str, wanted: N | None, bounds: tuple[N | None, ...]) -> N | None:
    """Return what is wanted, else the smallest bound."""
    least = min((each for each in bounds if each is not None), default=None)
    if wanted is not None and least is not None and wanted > least:
        raise _too_much(f"{name} may be {least} at most, got: {wanted}")
    return least if wanted is None else wanted


def items_of(
    asked: NewRun, limits: EndpointLimits, datasets: DatasetCatalog
) -> list[object] | Path | ItemsDataset | None:
    """Return what the run maps in place of the team's own items; None: nothing. A Dataset is to be opened yet.

    Raises:
        Refusal: there are none or too many of them, or the file or Dataset is not one that clients may name.
    """
    match asked.items:
        case None:
            return None
        case ItemsFile(file=file):
            return _file_of(file, limits)
        case ItemsDataset() as named:
            datasets.check(named.dataset)
            return named
        case items:
            if not items:
                raise Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST", "items must not be empty")
            if len(items) > limits.max_items:
                raise _too_much(f"items may be {limits.max_items} at most, got: {len(items)}")
            return list(items)


def _file_of(name: str, limits: EndpointLimits) -> Path:
    directory = limits.items_directory
    if directory is None:
        raise Refusal(
            HTTPStatus.BAD_REQUEST,
            "ITEMS_FILE_NOT_FOUND",
            "This endpoint serves no files of items. What to do: send the items, or let the operator set items_directory",
        )
    root = directory.expanduser().resolve()
    found = (root / name).resolve()
    if not found.is_relative_to(root) or not found.is_file():
        raise Refusal(HTTPStatus.BAD_REQUEST, "ITEMS_FILE_NOT_FOUND", f"There is no file of items '{name}'")
    return found


def _too_much(text: str) -> Refusal:
    return Refusal(HTTPStatus.BAD_REQUEST, "LIMIT_EXCEEDED", text)
