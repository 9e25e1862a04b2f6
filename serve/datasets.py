"""Ray Datasets that an operator offers as items: loaded by name, read by the run that maps them.

In: `module:attribute` names of the application's arguments. Out: a Dataset for a run. Only what is named there can be mapped by its
name. Never: a Dataset's rows in a request, or all of them in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import cast

from ensemble_ray import ValidationError
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.teamfile.references import find_attribute, make_importable


class DatasetCatalog:
    """The Datasets of one endpoint.

    Args:
        sources: By name: a Dataset, or a function without arguments that returns one.
        references: What they were loaded by, for messages.
    """

    def __init__(
        self, sources: Mapping[str, object] | None = None, references: Mapping[str, str] | None = None
    ) -> None:
        self._sources = dict(sources or {})
        self._references = dict(references or {})

    def check(self, name: str) -> None:
        """Refuse a name that is none of a Dataset.

        Raises:
            Refusal: it is none.
        """
        if name not in self._sources:
            known = ", ".join(sorted(self._sources))
            text = f"There is no Dataset '{name[:200]}'. There are: [{known}]"
            raise Refusal(HTTPStatus.BAD_REQUEST, "ITEMS_DATASET_NOT_FOUND", text)

    def open(self, name: str) -> object:
        """Return a Dataset whose rows come in the same order each time it is read. Blocks: a function may look at files.

        Runs of an endpoint outlive the process that reads their items; what goes on with one reads them again from the first.

        Raises:
            Refusal: there is none of that name, or its function returned something else, which only the operator can mend.
        """
        self.check(name)
        source = self._sources[name]
        found = source if _is_dataset(source) else cast("Callable[[], object]", source)()
        if not _is_dataset(found):
            text = (
                f"The Dataset '{name}' ({self._references.get(name, name)}) is of type {type(found).__name__}: return a "
                "ray.data.Dataset"
            )
            raise Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "INTERNAL_ERROR", text)
        _keep_order(found)
        return found


def _keep_order(dataset: object) -> None:
    """Have the rows of a Dataset come in one order, where it is one of Ray's."""
    options = getattr(getattr(dataset, "context", None), "execution_options", None)
    if options is not None:
        options.preserve_order = True


def parse_datasets(texts: str) -> dict[str, str]:
    """Return the references of a text such as `orders=shop:orders,people=shop:people`.

    Raises:
        ValidationError: a part of it has not that form.

    Example:
        >>> parse_datasets("orders=shop:orders, people=shop:read_people")
        {'orders': 'shop:orders', 'people': 'shop:read_people'}
    """
    found: dict[str, str] = {}
    for text in (each.strip() for each in texts.split(",")):
        name, equals, reference = text.partition("=")
        if text and not (name.strip() and equals and reference.strip()):
            raise ValidationError(f"A Dataset is NAME=module:attribute, got: '{text}'")
        if text:
            found[name.strip()] = reference.strip()
    return found


def load_datasets(references: Mapping[str, str]) -> DatasetCatalog:
    """Return the Datasets of these names: each a Dataset, or a function without arguments that returns one.

    Raises:
        ValidationError: a name is not found, or names something else.
    """
    if references:
        make_importable(Path.cwd())
    sources = {name: find_attribute(reference) for name, reference in references.items()}
    for name, source in sources.items():
        if not _is_dataset(source) and not callable(source):
            raise ValidationError(
                f"The Dataset '{name}' ({references[name]}) is of type {type(source).__name__}: name a ray.data.Dataset, or a "
                "function without arguments that returns one"
            )
    return DatasetCatalog(sources, references)


def _is_dataset(value: object) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "iter_rows", None))
