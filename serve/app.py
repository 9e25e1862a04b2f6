"""One team behind Ray Serve: `serve run ensemble_ray.serve.app:app team=team.yaml`. Package: serve; composition only.

The team is named by the argument `team` (also as `args` in Serve's configuration file) or by `ENSEMBLE_RAY_TEAM`. It is
loaded once where the deployment is made, so that a wrong name fails there, and once in each replica. Replicas run in
the cluster they are part of; none is started for them.

The address is Serve's, not ours: `serve run` with an import path listens on 127.0.0.1:8000. A configuration file
listens on all interfaces unless it says `http_options.host`; `deploy/serve.yaml` says 127.0.0.1.
"""

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, field_validator
from ray import serve as ray_serve
from ray.serve import Application

from ensemble_ray import RayRuntime
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.middleware import body_limit
from ensemble_ray.serve.team import team_name

__all__ = ["EndpointOptions", "app"]

#: Requests that a replica takes at once. They wait for models, hence far more than Serve's default of 5.
_MAX_ONGOING = 1000


class EndpointOptions(BaseModel):
    """Arguments of the application.

    Attributes:
        team: YAML path or `module:attribute`; None: what `ENSEMBLE_RAY_TEAM` says.
        max_body_bytes: Longer bodies of requests are refused; None: what `ENSEMBLE_RAY_MAX_BODY_BYTES` says, else 1 MiB.
        allowed_hosts: Names that requests may be for besides those of loopback, as a list or with commas between them;
            `*` for any.
    """

    model_config = ConfigDict(extra="forbid")

    team: str | None = None
    max_body_bytes: int | None = Field(default=None, gt=0)
    allowed_hosts: tuple[str, ...] = ()

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Split the names: on the command line they are one text."""
        return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


# Serve reads the annotation at run time, so this file has no `from __future__ import annotations`.
def app(options: EndpointOptions) -> Application:
    """Return the application that serves a team.

    Raises:
        ValidationError: no team is named, or it cannot be found, read or run.
    """
    name = team_name(options.team)
    name.load(needs_keys=False)
    max_body_bytes = body_limit(options.max_body_bytes)

    def api() -> FastAPI:
        return build_api(name.load(), RayRuntime(), max_body_bytes=max_body_bytes, allowed_hosts=options.allowed_hosts)

    replica = ray_serve.ingress(api)()
    as_deployment = ray_serve.deployment(
        name="endpoint", max_ongoing_requests=_MAX_ONGOING, ray_actor_options={"num_cpus": 0}
    )
    return as_deployment(replica).bind()
