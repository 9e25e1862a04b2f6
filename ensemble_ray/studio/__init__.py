"""Studio: a page that shows recorded runs and acts on them, and its server."""

from __future__ import annotations

from importlib.util import find_spec

from ensemble_ray.errors import ValidationError

_NEEDED = ("fastapi", "uvicorn", "websockets", "sse_starlette", "graphlay")


def check_installed(name: str) -> None:
    """Check that the packages of the extra `studio` are installed."""
    lacking = [package for package in _NEEDED if find_spec(package) is None]
    if lacking:
        msg = f"{name} needs packages that are not installed ({', '.join(lacking)}): pip install 'ensemble-ray[studio]'"
        raise ValidationError(msg)
