"""One reading of one team file: what the validators of its sections need to know. Package: loader.

In: the file's directory, and what the caller chose in place of what the file says. Out: paths, keys of models, user code.
Validators get it as pydantic's context; what they refuse they raise, and it is reported with its place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import pydantic
from pydantic_core import InitErrorDetails, PydanticCustomError

from ensemble_ray.errors import ValidationError
from ensemble_ray.loader.provenance import Expected, find_permitted
from ensemble_ray.loader.references import make_importable
from ensemble_ray.text.header_values import header_flaw

if TYPE_CHECKING:
    from ensemble_ray.items.sources import ItemSource
    from ensemble_ray.ports import ChatModel

__all__ = ["Reading", "context_of", "refuse", "refuse_keys"]

#: So many pieces of code one file may name; looking for each takes a search on the disk.
_MAX_REFERENCES = 1_000


class Reading:
    """What validators need to know.

    Attributes:
        directory: Of the file; paths in it are relative to it.
        llm: Takes the place of every model that the file names.
        needs_keys: False: the team will only be looked at, so keys may be missing.
        items: Takes the place of the items that the file names.
    """

    def __init__(
        self, directory: Path, *, llm: ChatModel | None, needs_keys: bool, items: ItemSource | None = None
    ) -> None:
        self.directory = directory
        self.llm = llm
        self.needs_keys = needs_keys
        self.items = items
        self._references = 0

    def resolve_path(self, path: str) -> Path:
        """Return the path as it is seen from the file's directory.

        Raises:
            ValidationError: it can be no path.
        """
        if "\0" in path:
            raise ValidationError("a path has no character NUL in it")
        try:
            return self.directory / Path(path).expanduser()
        except RuntimeError:
            raise ValidationError(f"'{path.partition('/')[0]}' names the home of a user who is not there") from None

    def read_key(self, variable: str) -> str:
        """Return the key that an environment variable holds.

        Raises:
            ValidationError: it is needed and not there.
        """
        key = os.environ.get(variable, "").strip()
        if not key and self.needs_keys:
            raise ValidationError(f"the environment variable '{variable}' is not set: export {variable}=...")
        if flaw := header_flaw(key):
            raise ValidationError(f"the environment variable '{variable}' {flaw}")
        return key or "not-set"

    def find(self, name: str, expected: Expected) -> object:
        """Find what the file names as `module:attribute`, beside the file and in the current directory first.

        The directories become importable here and not before: a file that names no code never has a module beside it
        taken for a library.

        Raises:
            ValidationError: as `find_permitted`.
        """
        self._references += 1
        if self._references > _MAX_REFERENCES:
            raise ValidationError(f"a team file names at most {_MAX_REFERENCES} pieces of code")
        make_importable(Path.cwd())
        make_importable(self.directory)
        return find_permitted(name, expected, (self.directory.resolve(), Path.cwd().resolve()))


def context_of(info: pydantic.ValidationInfo) -> Reading:
    """Return the reading that a validator is called in."""
    return cast("Reading", info.context)


def refuse(text: str, *path: str | int, at: Literal["key", "value", "around"] = "value") -> pydantic.ValidationError:
    """Return the error for something inside of what is being validated, or for its key.

    Args:
        text: What is wrong and what to do.
        path: Where, seen from what is being validated.
        at: Whether its place is that of the key, of the value, or of the mapping around them.
    """
    return _error([(text, path, at)])


def refuse_keys(texts: Mapping[str, str]) -> pydantic.ValidationError:
    """Return the error for keys of the mapping that is being validated; what is wrong stands beside each."""
    return _error([(text, (name,), "key") for name, text in texts.items()])


def _error(found: Sequence[tuple[str, tuple[str | int, ...], str]]) -> pydantic.ValidationError:
    return pydantic.ValidationError.from_exception_data(
        "",
        [
            InitErrorDetails(
                type=PydanticCustomError("refused", "refused", {"text": text, "at": at}), loc=path, input=None
            )
            for text, path, at in found
        ],
    )
