"""What editors and `help()` show of the public face is for users: no numbers of the specification."""

import inspect
import re
from collections.abc import Iterator

import ensemble_ray

NUMBER = re.compile(r"\bS-[A-Z]+-\d")


def _documented() -> Iterator[tuple[str, object]]:
    """Yield every public name, the classes that it is made of, and their members that users see."""
    for name in ensemble_ray.__all__:
        found: object = getattr(ensemble_ray, name)
        yield name, found
        for kind in found.__mro__ if isinstance(found, type) else ():
            if kind.__module__.startswith("ensemble_ray"):
                yield kind.__qualname__, kind
                yield from (
                    (f"{kind.__qualname__}.{member}", getattr(value, "__func__", value))
                    for member, value in dict(vars(kind)).items()
                    if not member.startswith("_") or member.startswith("__")
                )


def test_docstrings_of_the_face_have_no_numbers() -> None:
    """S-DOM-103: classes, functions, methods and properties."""
    shown = {
        name: own
        for name, found in [("ensemble_ray", ensemble_ray), *_documented()]
        if (inspect.isroutine(found) or isinstance(found, type | property) or found is ensemble_ray)
        and NUMBER.search(own := found.__doc__ or "")
    }
    assert not shown, "\n".join(shown)
