"""An endpoint of this machine: Ray, Serve and the teams, until Ctrl-C. Package: serve; what `ensemble-ray serve` begins.

In: names of teams and an address. Out: an endpoint that answers there. It joins the cluster of `RAY_ADDRESS`, or starts one for itself,
on loopback alone. Never: a second endpoint under a port that is taken.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pydantic
import ray
from ray import serve as ray_serve

from ensemble_ray import ValidationError
from ensemble_ray.access.admission import KeyPolicy, is_loopback
from ensemble_ray.access.key_store import KeyStore, open_keys
from ensemble_ray.actors import spawn
from ensemble_ray.actors.driver.cluster import LOCAL, join_or_start
from ensemble_ray.definition.model_keys import check_keys_of
from ensemble_ray.process.context import notify
from ensemble_ray.serve.app import EndpointOptions, app
from ensemble_ray.serve.catalog import load_catalog, load_models
from ensemble_ray.serve.driving.remote_runs import driver_name

if TYPE_CHECKING:
    from types import FrameType


#: Tells Serve's proxy to bound bodies as replicas do.
_PROXY_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
_PROXY_LIMIT = "ensemble_ray.serve.middleware:for_proxy"
_HIGHEST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointPlace:
    """Where an endpoint listens."""

    host: str
    #: 0: any that is free
    port: int

    def check(self) -> EndpointPlace:
        """Return it with a port that is free.

        Raises:
            ValidationError: the port is none, or is taken; or there is no such address here.
        """
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
        """Its address for clients."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def check_keys(place: EndpointPlace, policy: KeyPolicy, keys: KeyStore) -> None:
    """Refuse an endpoint that nobody could ask: it would listen beyond loopback, where a key is needed, and there is none.

    Raises:
        ValidationError: that is so.
        EnsembleError: the keys cannot be read.
    """
    if policy is KeyPolicy.NONE or (is_loopback(place.host) and policy is KeyPolicy.AUTO) or keys.read():
        return
    where = f"on {place.host}" if policy is KeyPolicy.AUTO else "with keys=required"
    raise ValidationError(
        f"An endpoint {where} needs keys, and there are none in {keys.location}. What to do: make one with ensemble-ray keys add "
        "NAME --teams TEAM,..., or serve with --keys none where a proxy in front of it knows the callers"
    )


def _check(options: Mapping[str, object]) -> EndpointOptions:
    """Return the arguments of the application.

    Raises:
        ValidationError: one of them is none.
    """
    try:
        return EndpointOptions.model_validate(dict(options))
    except pydantic.ValidationError as error:
        found = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors(include_url=False)]
        raise ValidationError("; ".join(f"{where}: {text}" for where, text in found)) from None


def serve_until_interrupted(
    options: Mapping[str, object], place: EndpointPlace, *, name: str, teams: Iterable[str]
) -> None:
    """Serve teams until this process is interrupted or told to end.

    Args:
        options: Arguments of the application, such as `teams`, which were loaded and have their keys: what begins this looks before it
            loads Ray Serve.
        place: Where it listens.
        teams: What the teams are called.
        name: Of the application; what was accepted under it before is gone on with.

    Raises:
        ValidationError: a team, a tool or a model cannot be found, read or run, the port is taken, or callers would need keys and there are
            none.
        EnsembleError: Ray cannot be joined or started.
    """
    stopped = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopped.set()

    checked = _check(options)
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
    cast("Any", ray_serve).start(
        proxy_location="HeadOnly",
        http_options={"host": place.host, "port": place.port},
    )
    cast("Any", ray_serve).run(app(checked), name=name, route_prefix="/")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    notify(f"Serving [{', '.join(teams)}] at {place.url} (Ctrl-C stops)")
    stopped.wait()
    notify("Stopping. Runs that have not ended go on with the next start")
    cast("Any", ray_serve).shutdown()
    if (driver := spawn.existing(driver_name(name, namespace))) is not None:
        ray.kill(driver, no_restart=True)
