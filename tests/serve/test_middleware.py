"""Settings of what requests have to pass, and what the shipped files say of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError as PydanticError

from ensemble_ray import ValidationError
from ensemble_ray.serve.app import EndpointOptions
from ensemble_ray.serve.middleware import BODY_VARIABLE, DEFAULT_MAX_BODY_BYTES, BodyLimit, body_limit, for_proxy

ROOT = Path(__file__).resolve().parents[2]


def test_limit_is_the_arguments_then_the_environments_then_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-SEC-80."""
    monkeypatch.delenv(BODY_VARIABLE, raising=False)
    assert body_limit() == DEFAULT_MAX_BODY_BYTES
    monkeypatch.setenv(BODY_VARIABLE, "5000")
    assert (body_limit(), body_limit(70)) == (5000, 70)
    (middleware,) = for_proxy()
    assert middleware.cls is BodyLimit
    assert middleware.kwargs == {"max_bytes": 5000}


@pytest.mark.parametrize("said", ["0", "-1", "1MB", "1e6"])
def test_limit_is_refused_when_it_is_no_number(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """S-SEC-80: a limit that is not understood is not left out."""
    monkeypatch.setenv(BODY_VARIABLE, said)
    with pytest.raises(ValidationError, match=BODY_VARIABLE):
        body_limit()


def test_options_are_read_as_the_command_line_and_files_give_them() -> None:
    """S-SEC-80, S-SEC-82: texts with commas, or lists."""
    typed = EndpointOptions.model_validate({"max_body_bytes": "500", "allowed_hosts": "a.example, b.example"})
    assert (typed.max_body_bytes, typed.allowed_hosts) == (500, ("a.example", "b.example"))
    assert EndpointOptions(allowed_hosts=("*.example",)).allowed_hosts == ("*.example",)
    for wrong in ("0", "many"):
        with pytest.raises(PydanticError):
            EndpointOptions.model_validate({"max_body_bytes": wrong})


def test_clusters_of_ours_hold_the_limit_in_serves_proxy() -> None:
    """S-SEC-80: the name in the shipped file is that of the function."""
    named = f"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH={for_proxy.__module__}:{for_proxy.__name__}"
    for file, count in (("cluster.yaml", 2), ("deploy/cluster-aws.yaml", 2), ("deploy/Dockerfile", 1)):
        assert (ROOT / file).read_text(encoding="utf-8").count(named) == count
    assert named in (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
