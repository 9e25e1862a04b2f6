"""The OpenAPI document is true: requests that it allows, and ones that it does not, are answered as it says.

schemathesis is imported by the tests: it takes a second, and every process of a test session reads this module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import Unsatisfiable

from ensemble_ray import InlineRuntime
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.callers import CallerCache
from ensemble_ray.serve.catalog import served_team
from ensemble_ray.serve.driving.driven_runs import DrivenRuns
from ensemble_ray.serve.driving.ledger import Ledger
from ensemble_ray.serve.middleware import OPEN_PATHS
from ensemble_ray.serve.run_service import RunService
from ensemble_ray.testing import ScriptedModel
from tests.serve.keys import make_key
from tests.serve.teams import pair


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the endpoint's runs and keys are; each operation is asked of the one that others were asked of before."""
    return tmp_path_factory.mktemp("endpoint")


@pytest.fixture(scope="module")
def key(place: Path) -> dict[str, str]:
    """The header of a key that may do everything."""
    return make_key(KeyFile(place))


class _Kept:
    """Runs that are there for longer than the client of a test, which begins and ends the interface."""

    def __init__(self, runs: RunService) -> None:
        self._runs = runs

    async def __aenter__(self) -> RunService:
        return self._runs

    async def __aexit__(self, *_: object) -> None:
        return None


@pytest.fixture(scope="module")
def runs(place: Path) -> Iterator[DrivenRuns]:
    """The runs of the endpoint."""
    team = served_team("team", pair(ScriptedModel(otherwise="fine")))
    found = DrivenRuns({"team": team}, InlineRuntime(home=place), Ledger(None))
    yield found
    run_blocking(found.close())


@pytest.fixture(scope="module")
def schema(runs: DrivenRuns, place: Path, key: dict[str, str]) -> Any:
    """The document of an endpoint in this process that asks for keys."""
    import schemathesis

    api = build_api(_Kept(runs), callers=CallerCache(KeyFile(place), find_standing=runs.standing))
    api.state.service = runs
    return schemathesis.openapi.from_asgi("/openapi.json", api, headers=key)


OPERATIONS = [
    *("GET /ensembles", "POST /runs", "GET /runs", "GET /runs/{run_id}", "POST /runs/{run_id}/cancel"),
    *("POST /runs/{run_id}/inject", "POST /runs/{run_id}/model", "GET /reviews", "POST /reviews/{run_id}/{gate_id}"),
    *("GET /runs/{run_id}/deliveries", "POST /runs/{run_id}/deliveries/{delivery_id}/redeliver"),
    *("GET /schedules", "GET /schedules/{ensemble}/{name}", "POST /schedules/{ensemble}/{name}/pause"),
    *("POST /schedules/{ensemble}/{name}/resume", "POST /schedules/{ensemble}/{name}/run"),
    *("GET /capabilities", "POST /tools/{name}/invoke", "GET /drain", "POST /drain", "POST /drain/end"),
    *(
        "GET /ensembles/{ensemble}/versions",
        "POST /ensembles/{ensemble}/versions",
        "POST /ensembles/{ensemble}/versions/{version}",
    ),
    *("GET /runs/{run_id}/events", "GET /healthz", "GET /readyz", "GET /metrics", "GET /quota"),
    *("GET /v1/models", "GET /v1/models/{model}", "POST /v1/chat/completions"),
    *("POST /v1/responses", "GET /v1/responses/{response_id}"),
    *("GET /.well-known/agent-card.json", "GET /a2a/{ensemble}/.well-known/agent-card.json", "POST /a2a/{ensemble}"),
]


def test_every_operation_is_tried(schema: Any) -> None:
    """A new route belongs into the list."""
    assert sorted(each.ok().label for each in schema.get_all_operations()) == sorted(OPERATIONS)


@pytest.mark.heavy
@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("label", OPERATIONS)
@pytest.mark.parametrize("has_key", [True, False])
def test_every_answer_is_as_the_document_says(
    *, schema: Any, runs: DrivenRuns, key: dict[str, str], label: str, mode: str, has_key: bool
) -> None:
    """S-SRV-4, S-SRV-60: no 5xx, and no answer that the document does not know; with a key, and without."""
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    kept = [not_a_server_error, checks.status_code_conformance, checks.content_type_conformance]
    kept += [checks.response_headers_conformance, checks.response_schema_conformance]
    method, _, path = label.partition(" ")

    @seed(20)
    # Without a key all of them are refused before anything of them is looked at, or are answered as with one.
    @settings(
        max_examples=20 if has_key else 3,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=schema[path][method].as_strategy(generation_mode=GenerationMode(mode)))
    def ask(case: Any) -> None:
        # What is made up for the key is taken away in one case and replaced in the other.
        others = {name: value for name, value in (case.headers or {}).items() if name.lower() != "authorization"}
        case.headers = others | (key if has_key else {})
        answer = case.call_and_validate(checks=kept)
        assert has_key or path in OPEN_PATHS or answer.status_code in {401, 405}

    with contextlib.suppress(Unsatisfiable):  # there is nothing to be wrong in it
        ask()
    run_blocking(runs.end_drain())
