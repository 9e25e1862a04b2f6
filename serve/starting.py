"""Starts an endpoint for `ensemble-ray serve`, on the cluster of `RAY_ADDRESS` or a local one."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import pydantic
import ray
from ray import serve as ray_serve

from ensemble_ray import ValidationError
from ensemble_ray.access.admission import KeyPolicy, is_loopback
from ensemble_ray.access.key_store import KeyStore, open_keys
from ensemble_ray.actors import spawn
from ensemble_ray.actors.driver.cluster import LOCAL, join_or_start
from ensemble_ray.definition.validation import check_keys_of
from ensemble_ray.process.context import notify
from ensemble_ray.serve.app import EndpointOptions, app
from ensemble_ray.serve.catalog import load_catalog, load_models
from ensemble_ray.serve.driving.driver import driver_name

_PROXY_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
_PROXY_LIMIT = "ensemble_ray.serve.middleware:for_proxy"
_HIGHEST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointPlace:
    host: str
    #: 0: any free port
    port: int

    def check(self) -> EndpointPlace:
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
    options: Mapping[str, object], place: EndpointPlace, *, name: str, teams: Iterable[str]
) -> None:
    """Serve teams until this process is interrupted or terminated.

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
    load_catalog(checked.tools)
    models = load_models(checked.models)
    cluster = os.environ.get("RAY_ADDRESS", "").strip() or LOCAL
    if cluster == LOCAL:
        check_keys_of(models.items())
        check_keys(place, policy, open_keys())
    place = place.check()
    os.environ.setdefault(_PROXY_VARIABLE, _PROXY_LIMIT)
    join_or_start(cluster, {})
    cast("Any", ray_serve).start(proxy_location="HeadOnly", http_options={"host": place.host, "port": place.port})
    cast("Any", ray_serve).run(app(checked), name=name, route_prefix="/")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    notify(f"Serving [{', '.join(teams)}] at {place.url} (Ctrl-C stops)")
    stopped.wait()
    notify("Stopping. Open runs resume at the next start")
    cast("Any", ray_serve).shutdown()
    if (driver := spawn.existing(driver_name(name, namespace))) is not None:
        ray.kill(driver, no_restart=True)
