"""Every error class of the packages survives pickling: an actor's error reaches the caller as itself."""

import importlib
import inspect
import pickle
from collections.abc import Iterator
from datetime import timedelta

from ensemble_ray import RateLimit
from tests.architecture.project import PACKAGES, module_names

#: Arguments that must be more than a text.
GIVEN: dict[str, object] = {
    "failures": {"model": "failure"},
    "violations": ("violation",),
    "rate_limit": RateLimit.per_minute(1),
    "wait_timeout": timedelta(seconds=1),
}


def _error_classes() -> Iterator[type[BaseException]]:
    found: dict[str, type[BaseException]] = {}
    for name in module_names(*PACKAGES):
        if name == "ensemble_ray.serve.app":  # loads a team as it is imported
            continue
        for each in vars(importlib.import_module(name)).values():
            if inspect.isclass(each) and issubclass(each, BaseException) and each.__module__ == name:
                found[f"{name}.{each.__qualname__}"] = each
    yield from (found[name] for name in sorted(found))


def _made(kind: type[BaseException]) -> BaseException:
    """An instance with a text for every argument that has no default."""
    if kind.__init__ is Exception.__init__ or not inspect.isfunction(kind.__init__):
        return kind("text")  # a class that takes what every exception takes, of which Python knows no signature
    parameters = list(inspect.signature(kind).parameters.values())
    needed = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_POSITIONAL]
    by_name = [each.name for each in needed if each.kind is each.KEYWORD_ONLY]
    assert by_name == [], f"{kind.__name__}: keyword-only arguments {by_name} do not survive Ray"
    return kind(*(GIVEN.get(each.name, each.name) for each in needed))


def test_every_error_is_itself_when_pickled() -> None:
    """S-CONV-32, S-ERR-33: class, text and fields arrive."""
    kinds = list(_error_classes())
    assert len(kinds) > 20
    for kind in kinds:
        error = _made(kind)
        arrived = pickle.loads(pickle.dumps(error))  # noqa: S301  our own bytes
        assert type(arrived) is kind
        assert str(arrived) == str(error)
        assert arrived.args == error.args
        fields = {name: repr(value) for name, value in vars(error).items()}
        assert {name: repr(value) for name, value in vars(arrived).items()} == fields
