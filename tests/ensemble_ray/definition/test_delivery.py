"""`delivery` of maps, in Python and in team files."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ensemble_ray import BatchDelivery, CostConfiguration, MapEnsemble, Task, ValidationError
from ensemble_ray.cli.map_team import map_team
from ensemble_ray.teamfile import load_runnable


def mapping(**fields: object) -> MapEnsemble:
    return MapEnsemble(items=["a"], map_task=Task.of, **fields)  # type: ignore[arg-type]  # of any kind


@pytest.mark.parametrize(
    ("given", "delivery"),
    [
        (None, None),
        ("calls", None),
        ("batch", BatchDelivery()),
        (BatchDelivery(max_age=60), BatchDelivery(max_age=timedelta(minutes=1))),
    ],
)
def test_delivery_is_a_word_or_limits(given: object, delivery: BatchDelivery | None) -> None:
    """S-BAT-1, S-BAT-2."""
    assert mapping(delivery=given).delivery == delivery


@pytest.mark.parametrize("given", ["post", True, 3])
def test_other_delivery_is_refused(given: object) -> None:
    """S-BAT-1."""
    with pytest.raises(ValidationError, match=r"delivery must be 'calls', 'batch' or a BatchDelivery, got: "):
        mapping(delivery=given)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("max_requests", 0, "max_requests must be >= 1, got: 0"),
        ("max_bytes", -1, "max_bytes must be >= 1, got: -1"),
        ("max_items", 0, "max_items must be >= 1, got: 0"),
        ("max_age", 0, "max_age must be above 0 s and at most 365 days, got: 0"),
        ("poll_interval", float("nan"), "poll_interval must be above 0 s"),
        ("linger", timedelta(days=400), "linger must be above 0 s"),
    ],
)
def test_limits_have_ranges(field: str, value: object, told: str) -> None:
    """S-BAT-2."""
    with pytest.raises(ValidationError, match=f"BatchDelivery {told}"):
        BatchDelivery(**{field: value})  # type: ignore[arg-type]


def test_share_of_the_price_is_not_negative() -> None:
    """S-BAT-34."""
    prices = CostConfiguration(input_token_rate=2, output_token_rate=4)
    estimate = prices.estimate(10, 10, delivery="batch")
    assert estimate is not None
    assert estimate.total_cost == 30
    assert "batch_share" not in prices.model_dump()
    with pytest.raises(ValidationError, match="CostConfiguration batch_share must be >= 0"):
        prices.replace(batch_share=-1)


FILE = """
llm: openai:m
map_reduce:
  items: [a, b]
  map: {{description: "Read {{item}}"}}
  delivery: {delivery}
"""


@pytest.mark.parametrize(
    ("text", "delivery"),
    [
        ("calls", None),
        ("batch", BatchDelivery()),
        ("{max_age: 3600, max_requests: 10}", BatchDelivery(max_age=3600, max_requests=10)),
    ],
)
def test_team_file_has_the_same_key(text: str, delivery: BatchDelivery | None, tmp_path: Path) -> None:
    """S-BAT-6."""
    file = tmp_path / "team.yaml"
    file.write_text(FILE.format(delivery=text), encoding="utf-8")
    team = load_runnable(str(file))
    assert isinstance(team, MapEnsemble)
    assert team.delivery == delivery


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("btch", "must be `calls`, `batch`, or options of batches such as 'max_age'. Did you mean 'batch'?"),
        ("{max_ages: 1}", "unknown key of a delivery in batches. Did you mean 'max_age'?"),
        ("{max_requests: 0}", "BatchDelivery max_requests must be >= 1, got: 0"),
    ],
)
def test_mistake_in_a_team_file_has_its_place(text: str, told: str, tmp_path: Path) -> None:
    """S-BAT-6, S-MR-176."""
    file = tmp_path / "team.yaml"
    file.write_text(FILE.format(delivery=text), encoding="utf-8")
    with pytest.raises(ValidationError) as caught:
        load_runnable(str(file))
    assert told in str(caught.value)
    assert "team.yaml:6" in str(caught.value)


def test_command_line_has_the_same_option(tmp_path: Path) -> None:
    """S-BAT-6: of a map, a map-reduce, and in place of a team file's."""
    items = tmp_path / "items.jsonl"
    items.write_text('"a"\n', encoding="utf-8")
    options = {"items": str(items), "prompt": "Read {item}", "output": str(tmp_path / "rows.jsonl")}
    assert map_team(options).delivery is None
    assert map_team({**options, "delivery": "batch"}).delivery == BatchDelivery()
    assert map_team({**options, "delivery": "batch", "reduce": "Join"}).delivery == BatchDelivery()
    team = tmp_path / "team.yaml"
    team.write_text(FILE.format(delivery="batch"), encoding="utf-8")
    assert map_team({"ensemble": str(team), "delivery": "calls"}).delivery is None
