"""Ray Datasets that an operator offers, as items of requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ensemble_ray import ValidationError
from ensemble_ray.serve.app import EndpointOptions
from ensemble_ray.serve.catalog import DatasetCatalog, load_datasets, parse_datasets
from ensemble_ray.serve.schemas import Refusal
from ensemble_ray.testing import ScriptedModel
from tests.serve.conftest import Connect
from tests.serve.teams import mapped, pair

MODULE = """
class Rows:
    def iter_rows(self):
        yield from ({"n": 1}, {"n": 2})

ROWS = Rows()

def read():
    return Rows()

def nothing():
    return [1]

WORD = "orders"
"""


class Rows:
    """Has rows, and a context, as a Ray Dataset has them; the real one is asked in tests/scenarios/test_datasets.py."""

    def __init__(self) -> None:
        self.context = SimpleNamespace(execution_options=SimpleNamespace(preserve_order=False))

    def iter_rows(self) -> Iterator[dict[str, int]]:
        """Rows."""
        yield from ({"n": 1}, {"n": 2})


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with Datasets in it."""
    (tmp_path / "datasets_of_test.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "datasets_of_test"


async def test_a_request_maps_a_dataset_by_its_name(connect: Connect) -> None:
    """S-SRV-54: any name that the operator did not give is refused, with those that there are."""
    model = ScriptedModel(otherwise=lambda call: "joined" if "Join" in call.text else "read")
    async with connect(mapped(model), datasets=DatasetCatalog({"orders": Rows(), "made": Rows})) as client:
        for name in ("orders", "made"):
            answer = await client.post("/runs?wait=60", json={"items": {"dataset": name}})
            assert [each["text"] for each in answer.json()["result"]["tasks"]] == ["read", "read", "joined"]
        unknown = await client.post("/runs", json={"items": {"dataset": "../orders"}})
        both = await client.post("/runs", json={"items": {"dataset": "orders", "file": "orders.csv"}})
    assert (unknown.status_code, unknown.json()["code"]) == (400, "ITEMS_DATASET_NOT_FOUND")
    assert "There are: [made, orders]" in unknown.json()["message"]
    assert both.status_code == 422
    assert [call.text.count("'n': 1") for call in model.calls[:2]] == [1, 0]


async def test_a_team_that_maps_nothing_takes_no_dataset(connect: Connect) -> None:
    """S-SRV-54, S-SRV-16."""
    async with connect(pair(ScriptedModel()), datasets=DatasetCatalog({"orders": Rows()})) as client:
        body = {"inputs": {"topic": "x", "reader": "y"}, "items": {"dataset": "orders"}}
        assert (await client.post("/runs", json=body)).json()["code"] == "ITEMS_NOT_TAKEN"


async def test_a_function_that_gives_no_dataset_rejects_the_run(connect: Connect) -> None:
    """S-SRV-54: it is called when the run begins."""
    async with connect(mapped(ScriptedModel()), datasets=DatasetCatalog({"orders": lambda: [1]})) as client:
        answer = await client.post("/runs?wait=60", json={"items": {"dataset": "orders"}, "run_id": "a"})
        found = await client.get("/runs/a")
    assert (answer.status_code, found.json()["status"]) == (500, "rejected")
    assert "'orders' (orders) is of type list: return a ray.data.Dataset" in found.json()["error"]["message"]


def test_rows_come_in_one_order() -> None:
    """S-SRV-54: so that a run can be gone on with in another process."""
    rows = Rows()
    assert DatasetCatalog({"orders": rows}).open("orders") is rows
    assert rows.context.execution_options.preserve_order
    with pytest.raises(Refusal):
        DatasetCatalog().open("orders")


def test_datasets_are_loaded_by_name(module: str) -> None:
    """S-SRV-54: what is none is refused before anything is started."""
    catalog = load_datasets({"rows": f"{module}:ROWS", "read": f"{module}:read"})
    for name in ("rows", "read"):
        assert type(catalog.open(name)).__name__ == "Rows"
    with pytest.raises(
        ValidationError, match=r"'word' \(datasets_of_test:WORD\) is of type str: name a ray.data.Dataset"
    ):
        load_datasets({"word": f"{module}:WORD"})
    with pytest.raises(ValidationError, match="missing"):
        load_datasets({"missing": f"{module}:missing"})


def test_names_stand_in_one_text_on_the_command_line() -> None:
    """S-SRV-54."""
    given = EndpointOptions.model_validate({"datasets": "a=m:x, b=m:y"})
    assert given.datasets == parse_datasets("b=m:y,a=m:x,") == {"a": "m:x", "b": "m:y"}
    assert EndpointOptions().datasets == parse_datasets("") == {}
    for wrong in ("m:x", "=m:x", "a="):
        with pytest.raises(ValidationError, match="NAME=module:attribute"):
            parse_datasets(wrong)
