"""Studio: what runs recorded, as data for a page; what may be done with them, and the server of both."""

from __future__ import annotations

from importlib.util import find_spec

from ensemble_ray.errors import ValidationError

#: What the extra `studio` brings.
_NEEDED = ("fastapi", "uvicorn", "websockets", "sse_starlette", "graphlay")


def check_installed(name: str) -> None:
    """Check that what serves is installed; `name` is what needs it.

    Raises:
        ValidationError: it is not.
    """
    lacking = [package for package in _NEEDED if find_spec(package) is None]
    if lacking:
        raise ValidationError(
            f"{name} needs packages that are not installed ({', '.join(lacking)}): pip install 'ensemble-ray[studio]'"
        )
