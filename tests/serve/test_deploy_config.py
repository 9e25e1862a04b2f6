"""The shipped configuration of Serve; `test_app.py` runs it."""

from __future__ import annotations

from pathlib import Path

import yaml
from ray.serve.schema import ServeDeploySchema

from ensemble_ray.serve.app import EndpointOptions

FILE = Path(__file__).resolve().parents[2] / "deploy" / "serve.yaml"


def test_it_is_valid_and_listens_on_loopback_alone() -> None:
    """By Serve's own schema; without a host in the file Serve would listen on every interface."""
    config = ServeDeploySchema.model_validate(yaml.safe_load(FILE.read_text(encoding="utf-8")))
    assert config.http_options.host == "127.0.0.1"
    (application,) = config.applications
    assert application.import_path == "ensemble_ray.serve.app:app"
    assert EndpointOptions.model_validate(application.args).teams
