"""Teams behind Ray Serve: `serve run ensemble_ray.serve.app:app ensembles=team.yaml`. Package: serve; composition only.

Teams are named by the argument `ensembles` (also as `args` in Serve's configuration file) or by `ENSEMBLE_RAY_ENSEMBLES`. They are
loaded once where the deployment is made, so that a wrong name fails there, and once in the process that drives their runs. Replicas
load none: they ask that process. Runs live in the cluster they are part of; none is started for them.

The address is Serve's, not ours: `serve run` with an import path listens on 127.0.0.1:8000. A configuration file
listens on all interfaces unless it says `http_options.host`; `deploy/serve.yaml` says 127.0.0.1.
"""

import os
from collections.abc import Mapping
from dataclasses import replace

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator
from ray import serve as ray_serve
from ray.serve import Application

from ensemble_ray import ValidationError
from ensemble_ray.access.admission import KeyPolicy
from ensemble_ray.actors.driver.runtime import check_namespace
from ensemble_ray.process.config import Settings
from ensemble_ray.process.forks import SystemClock
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.catalog import load_catalog, load_datasets, load_models, named_models, parse_datasets
from ensemble_ray.serve.driving.remote_runs import RemoteRuns
from ensemble_ray.serve.driving.requests import DriverConfig, EndpointLimits
from ensemble_ray.serve.middleware import body_limit
from ensemble_ray.serve.team import load_teams, team_names

#: Requests that a replica takes at once. They wait for runs, hence far more than Serve's default of 5.
_MAX_ONGOING = 1000


class EndpointOptions(BaseModel):
    """Arguments of the application.

    Attributes:
        ensembles: YAML paths or `module:attribute`, as a list or with commas between them; none: what `ENSEMBLE_RAY_ENSEMBLES` says.
            `teams` and `team` are deprecated names of it.
        max_body_bytes: Longer bodies of requests are refused; None: what `ENSEMBLE_RAY_MAX_BODY_BYTES` says, else 8 MiB.
        allowed_hosts: Names that requests may be for besides those of loopback, as a list or with commas between them;
            `*` for any.
        tools: `module:attribute` names of tools that clients with the right `admin` may call, as a list or with commas
            between them.
        models: Models that runs can be told to ask, by name: `module:attribute`, or what a team file says as `llm`; on the
            command line `NAME=MODEL`, with commas between them.
        datasets: Ray Datasets whose rows requests may map, as `NAME: module:attribute`, or with commas between
            `NAME=module:attribute`.
        cancel_on_disconnect: Whether a run that was asked for through the OpenAI API ends with its connection.
        allowed_origins: Origins whose pages may ask, as a list or with commas between them; every request needs a key then.
        keys: Which requests need a key: `auto`, all once a key was made, and before that all that do not come by loopback;
            `required`, all; `none`, none, for something before the endpoint that knows the callers.
        namespace: Of the schedulers that have its runs; None: what `ENSEMBLE_RAY_NAMESPACE` says where it is deployed, else the
            one without a name.
        public_url: Where clients reach the endpoint, such as `https://teams.example.org`, for the A2A cards of its teams; None: where
            a request for a card came to.
        studio: Whether the page over the endpoint's runs is served at `/studio`.
        replicas: Processes that answer requests.
        limits: What runs may use, and how many there may be.
    """

    model_config = ConfigDict(extra="forbid")

    ensembles: tuple[str, ...] = ()
    max_body_bytes: int | None = Field(default=None, gt=0)
    allowed_hosts: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    models: dict[str, JsonValue] = Field(default_factory=dict)
    datasets: dict[str, str] = Field(default_factory=dict[str, str])
    cancel_on_disconnect: bool = True
    allowed_origins: tuple[str, ...] = ()
    keys: KeyPolicy = KeyPolicy.AUTO
    namespace: str | None = None
    public_url: str | None = Field(default=None, pattern=r"^https?://[^\s]+$")
    studio: bool = True
    replicas: int = Field(default=1, gt=0)
    limits: EndpointLimits = EndpointLimits()

    @model_validator(mode="before")
    @classmethod
    def _join(cls, data: object) -> object:
        """Join what is given under the deprecated names of `ensembles`."""
        if not isinstance(data, Mapping) or not {"teams", "team"} & data.keys():
            return data
        rest = {name: value for name, value in data.items() if name not in {"teams", "team"}}
        joined: list[object] = []
        for given in (data.get(name) for name in ("ensembles", "teams", "team")):
            names = _names_in(given)
            joined += names if isinstance(names, list | tuple) else [] if names is None else [names]
        return {**rest, "ensembles": joined}

    @field_validator("allowed_hosts", "allowed_origins", "ensembles", "tools", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Split the names: on the command line they are one text."""
        return _names_in(value)

    @field_validator("models", mode="before")
    @classmethod
    def _pair(cls, value: object) -> object:
        """Split names from models: on the command line all are one text."""
        return named_models(value.split(",")) if isinstance(value, str) else value

    def chosen_namespace(self) -> str:
        """Return the namespace of its runs; empty: the one without a name.

        Raises:
            ValidationError: it is none.
        """
        chosen = Settings.from_environment().namespace if self.namespace is None else self.namespace
        return check_namespace(chosen.strip())

    @field_validator("datasets", mode="before")
    @classmethod
    def _parse(cls, value: object) -> object:
        """Read the names: on the command line they are one text."""
        return parse_datasets(value) if isinstance(value, str) else value

    def key_policy(self) -> KeyPolicy:
        """Return which requests need a key (S-SRV-152).

        Raises:
            ValidationError: pages of other origins may ask, and nobody would be asked who they are.
        """
        if self.allowed_origins and self.keys is KeyPolicy.NONE:
            raise ValidationError("allowed_origins needs keys: with keys=none every page there could run these teams")
        # Serve's HAProxy comes to a replica by an address of this machine, whoever sent the request.
        is_behind_proxy = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY", "0") == "1"
        is_auto = self.keys is KeyPolicy.AUTO
        return KeyPolicy.REQUIRED if is_auto and (is_behind_proxy or self.allowed_origins) else self.keys


def _names_in(value: object) -> object:
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


# Serve reads the annotation at run time, so this file has no `from __future__ import annotations`.
def app(options: EndpointOptions) -> Application:
    """Return the application that serves teams.

    Raises:
        ValidationError: no team is named, or one cannot be found, read or run.
    """
    policy = options.key_policy()
    names = team_names(options.ensembles)
    load_teams(names, needs_keys=False)
    load_catalog(options.tools)
    load_models(options.models, needs_keys=False)
    load_datasets(options.datasets)
    max_body_bytes = body_limit(options.max_body_bytes)
    config = DriverConfig(
        name="",
        teams=names,
        limits=options.limits,
        deployed_at=SystemClock().now(),
        keys=policy,
        tools=options.tools,
        models=options.models,
        namespace=options.chosen_namespace(),
        datasets=options.datasets,
    )

    def api() -> FastAPI:
        named = replace(config, name=ray_serve.get_replica_context().app_name)
        runs = RemoteRuns(named)
        return build_api(
            runs,
            callers=runs,
            max_body_bytes=max_body_bytes,
            allowed_hosts=options.allowed_hosts,
            allowed_origins=options.allowed_origins,
            cancel_on_disconnect=options.cancel_on_disconnect,
            has_studio=options.studio,
            public_url=options.public_url,
        )

    replica = ray_serve.ingress(api)()
    as_deployment = ray_serve.deployment(
        name="endpoint",
        num_replicas=options.replicas,
        max_ongoing_requests=_MAX_ONGOING,
        ray_actor_options={"num_cpus": 0},
    )
    return as_deployment(replica).bind()
