"""Teams behind Ray Serve: `serve run ensemble_ray.serve.app:app ensembles=team.yaml`.

The deploying process loads the teams, so that a wrong name fails there. Replicas load none. Serve listens on 127.0.0.1:8000 with an
import path, but on all interfaces with a configuration file without `http_options.host`.
"""

import os
import signal
import socket
import threading
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, cast

import pydantic
import ray
from fastapi import FastAPI
from msgspec import Struct
from msgspec.structs import replace
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, field_validator, model_validator
from ray import serve as ray_serve
from ray.serve import Application

from ensemble_ray import ValidationError
from ensemble_ray.access.admission import KeyPolicy, is_loopback
from ensemble_ray.access.key_store import KeyStore, open_keys
from ensemble_ray.actors import spawn
from ensemble_ray.actors.driver.cluster import LOCAL, join_or_start
from ensemble_ray.actors.driver.runtime import check_namespace
from ensemble_ray.definition.validation import check_keys_of
from ensemble_ray.process.concurrency import SystemClock
from ensemble_ray.process.config import Settings
from ensemble_ray.process.context import notify
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.catalog import (
    load_catalog,
    load_datasets,
    load_models,
    load_teams,
    named_models,
    parse_datasets,
    team_names,
)
from ensemble_ray.serve.driving.driver import RemoteRuns, drain_before_stop, driver_name
from ensemble_ray.serve.driving.requests import DriverConfig, EndpointLimits
from ensemble_ray.serve.driving.webhooks import check_secrets, check_team_webhooks, parse_webhooks
from ensemble_ray.serve.middleware import body_limit
from ensemble_ray.serve.schemas import NewWebhook

#: Requests wait for runs, so this is far above Serve's default of 5.
_MAX_ONGOING = 1000


def _names_in(value: object) -> object:
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


_Names = Annotated[tuple[str, ...], BeforeValidator(_names_in)]


class EndpointOptions(BaseModel):
    """Arguments of the application. On the command line, the elements of a list are separated by commas.

    Attributes:
        ensembles: YAML paths or `module:attribute`; empty: `ENSEMBLE_RAY_ENSEMBLES`. `teams` and `team` are deprecated names.
        max_body_bytes: None: `ENSEMBLE_RAY_MAX_BODY_BYTES`, else 8 MiB.
        allowed_hosts: Host names besides those of loopback; `*` for any.
        tools: `module:attribute` names of tools for clients with the right `admin`.
        models: Models to which runs can switch, by name: `module:attribute`, or a value of `llm`; as text `NAME=MODEL`.
        datasets: Ray Datasets whose rows requests may map, as `NAME: module:attribute`; as text `NAME=module:attribute`.
        cancel_on_disconnect: Whether a run of the OpenAI API ends with its connection.
        allowed_origins: Origins whose pages may send requests. With one, every request needs a key.
        keys: `auto`: requests need a key once one exists, and before that unless they come from loopback; `required`; `none`, for a
            proxy in front that identifies callers.
        namespace: Of the schedulers; None: `ENSEMBLE_RAY_NAMESPACE` of the deploying process, else the default one.
        public_url: Base URL in A2A cards, such as `https://teams.example.org`; None: that of the request.
        studio: Whether to serve Studio at `/studio`.
        watch: Whether changed team files are loaded by themselves.
        replicas: Processes that answer requests.
        webhooks: Receivers of the events of all runs of a team, by its name, or `*` for all teams: a URL, or `url` and `events`; as
            text `TEAM=URL`. `ENSEMBLE_RAY_WEBHOOK_SECRET` of the cluster's head signs them.
        webhook_hosts: Hosts that webhooks may reach although they are not public, also over http; `*` for any.
    """

    model_config = ConfigDict(extra="forbid")

    ensembles: _Names = ()
    max_body_bytes: int | None = Field(default=None, gt=0)
    allowed_hosts: _Names = ()
    tools: _Names = ()
    models: dict[str, JsonValue] = Field(default_factory=dict)
    datasets: dict[str, str] = Field(default_factory=dict[str, str])
    cancel_on_disconnect: bool = True
    allowed_origins: _Names = ()
    keys: KeyPolicy = KeyPolicy.AUTO
    namespace: str | None = None
    public_url: str | None = Field(default=None, pattern=r"^https?://[^\s]+$")
    studio: bool = True
    watch: bool = False
    replicas: int = Field(default=1, gt=0)
    limits: EndpointLimits = EndpointLimits()
    webhooks: dict[str, NewWebhook] = Field(default_factory=dict[str, NewWebhook])
    webhook_hosts: _Names = ()

    @model_validator(mode="before")
    @classmethod
    def _join(cls, data: object) -> object:
        if not isinstance(data, Mapping) or not {"teams", "team"} & data.keys():
            return data
        rest = {name: value for name, value in data.items() if name not in {"teams", "team"}}
        joined: list[object] = []
        for given in (data.get(name) for name in ("ensembles", "teams", "team")):
            names = _names_in(given)
            joined += names if isinstance(names, list | tuple) else [] if names is None else [names]
        return {**rest, "ensembles": joined}

    @field_validator("models", mode="before")
    @classmethod
    def _pair(cls, value: object) -> object:
        return named_models(value.split(",")) if isinstance(value, str) else value

    def chosen_namespace(self) -> str:
        """Return the namespace of its runs; empty: the default one."""
        chosen = Settings.from_environment().namespace if self.namespace is None else self.namespace
        return check_namespace(chosen.strip())

    @field_validator("datasets", mode="before")
    @classmethod
    def _parse(cls, value: object) -> object:
        return parse_datasets(value) if isinstance(value, str) else value

    @field_validator("webhooks", mode="before")
    @classmethod
    def _parse_webhooks(cls, value: object) -> object:
        return parse_webhooks(value)

    def key_policy(self) -> KeyPolicy:
        """Return which requests need a key, or raise a `ValidationError` if origins are allowed without any (S-SRV-152)."""
        if self.allowed_origins and self.keys is KeyPolicy.NONE:
            raise ValidationError("allowed_origins needs keys: with keys=none every page there could run these teams")
        # Serve's HAProxy sends all requests to a replica from an address of this machine.
        is_behind_proxy = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY", "0") == "1"
        is_auto = self.keys is KeyPolicy.AUTO
        return KeyPolicy.REQUIRED if is_auto and (is_behind_proxy or self.allowed_origins) else self.keys


# Serve reads the annotation at run time: no `from __future__ import annotations` here.
def app(options: EndpointOptions) -> Application:
    """Return the Serve application, or raise a `ValidationError` if a team, tool, model or Dataset cannot be loaded."""
    policy = options.key_policy()
    names = team_names(options.ensembles)
    teams = load_teams(names, needs_keys=False)
    check_team_webhooks(options.webhooks, options.webhook_hosts, teams)
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
        webhooks=options.webhooks,
        webhook_hosts=options.webhook_hosts,
        watch=options.watch,
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


_PROXY_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
_PROXY_LIMIT = "ensemble_ray.serve.middleware:for_proxy"
_HIGHEST_PORT = 65535


class EndpointPlace(Struct, frozen=True, kw_only=True):
    host: str
    #: 0: any free port
    port: int

    def check(self) -> "EndpointPlace":
        if not 0 <= self.port <= _HIGHEST_PORT:
            raise ValidationError(f"port must be in the range 0-{_HIGHEST_PORT}, got: {self.port}")
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            with socket.socket(family) as opened:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                opened.bind((self.host, self.port))
                return EndpointPlace(host=self.host, port=int(opened.getsockname()[1]))
        except OSError as error:
            raise ValidationError(
                f"Cannot listen on {self.host}:{self.port}: {error.strerror or error}. Choose another --port"
            ) from error

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def check_keys(place: EndpointPlace, policy: KeyPolicy, keys: KeyStore) -> None:
    """Raise a `ValidationError` if the requests of an endpoint need a key and there is none."""
    if policy is KeyPolicy.NONE or (is_loopback(place.host) and policy is KeyPolicy.AUTO) or keys.read():
        return
    where = f"on {place.host}" if policy is KeyPolicy.AUTO else "with keys=required"
    raise ValidationError(
        f"An endpoint {where} needs keys, and there are none in {keys.location}. What to do: make one with ensemble-ray keys add "
        "NAME --teams TEAM,..., or serve with --keys none if a proxy in front of it identifies callers"
    )


def serve_until_interrupted(
    options: Mapping[str, object], place: EndpointPlace, *, name: str, teams: Iterable[str], drain_s: float = 0.0
) -> None:
    """Serve teams until this process is interrupted or terminated, then drain up to `drain_s`, and stop.

    Raises:
        ValidationError: a team, tool or model cannot be loaded, the port is in use, or keys are needed and there are none.
        EnsembleError: Ray cannot be joined or started.
    """
    stopped = threading.Event()
    try:
        checked = EndpointOptions.model_validate(dict(options))
    except pydantic.ValidationError as error:
        found = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors(include_url=False)]
        raise ValidationError("; ".join(f"{where}: {text}" for where, text in found)) from None
    policy, namespace = checked.key_policy(), checked.chosen_namespace()
    check_team_webhooks(checked.webhooks, checked.webhook_hosts, teams)
    load_catalog(checked.tools)
    models = load_models(checked.models)
    cluster = os.environ.get("RAY_ADDRESS", "").strip() or LOCAL
    if cluster == LOCAL:
        check_keys_of(models.items())
        check_keys(place, policy, open_keys())
        check_secrets(checked.webhooks)
    place = place.check()
    os.environ.setdefault(_PROXY_VARIABLE, _PROXY_LIMIT)
    join_or_start(cluster, {})
    cast("Any", ray_serve).start(proxy_location="HeadOnly", http_options={"host": place.host, "port": place.port})
    cast("Any", ray_serve).run(app(checked), name=name, route_prefix="/")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    notify(f"Serving [{', '.join(teams)}] at {place.url} (Ctrl-C stops)")
    stopped.wait()
    driver = spawn.existing(driver_name(name, namespace))
    if driver is not None and drain_s > 0:
        stopped.clear()
        drain_before_stop(driver, drain_s, stopped)
    notify("Stopping. Open runs resume at the next start")
    cast("Any", ray_serve).shutdown()
    if driver is not None:
        ray.kill(driver, no_restart=True)
