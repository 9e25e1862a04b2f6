"""Bodies that no client of the OpenAI API would send: each is answered or refused, none breaks anything."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.openai_api import ChatBody, ResponseBody
from ensemble_ray.serve.schemas import RunStatus
from tests.serve.runs_double import RunsDouble, as_service, detail

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["user", "assistant", "text", "message", "team", "\ud800"]),
)
KEYS = st.one_of(st.sampled_from(["role", "content", "type", "text", "include_usage"]), st.text(max_size=4))
JSON = st.recursive(
    LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)), max_leaves=6
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": JSON}), max_size=2)


def bodies(fields: list[str], said: str) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies that are right but for some fields."""
    right = {"model": st.just("team"), said: MESSAGES | st.just([{"role": "user", "content": "Hi"}]) | JSON}
    return st.fixed_dictionaries(right, optional=dict.fromkeys(fields, JSON))


@pytest.mark.parametrize(
    ("path", "said", "fields"),
    [
        ("/v1/chat/completions", "messages", sorted({*ChatBody.model_fields, "temperature"} - {"messages", "model"})),
        ("/v1/responses", "input", sorted({*ResponseBody.model_fields, "temperature"} - {"input", "model"})),
    ],
)
def test_no_body_breaks_the_endpoint(path: str, said: str, fields: list[str]) -> None:
    """S-SRV-113: 200 or 400, in the form of this API."""
    double = RunsDouble(end=detail(RunStatus.COMPLETED, "fine"))
    with TestClient(build_api(as_service(double), allowed_hosts=["testserver"])) as client:

        @seed(4)
        @settings(max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(body=bodies(fields, said) | JSON)
        def ask(body: Any) -> None:
            found = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            assert found.status_code in {200, 400}, found.text
            if found.status_code == 400:
                assert set(found.json()["error"]) == {"message", "type", "param", "code"}

        ask()


@pytest.mark.parametrize(
    ("content", "declared"),
    [
        (b"{", "application/json"),
        (b"\xff", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b"{}", "text/plain"),
    ],
)
def test_what_is_no_json_is_refused_in_the_form_of_this_api(content: bytes, declared: str) -> None:
    """S-SRV-113."""
    with TestClient(build_api(as_service(RunsDouble()), allowed_hosts=["testserver"])) as client:
        found = client.post("/v1/chat/completions", content=content, headers={"content-type": declared})
    assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_request")
