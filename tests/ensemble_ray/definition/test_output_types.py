"""The classes that factories refer to, by name."""

from __future__ import annotations

import fractions
import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, UnionType
from typing import Literal, NewType, Optional, Union, cast

import pytest
from pydantic import BaseModel
from typing_extensions import TypeAliasType

from ensemble_ray import Task
from ensemble_ray.definition.map_reduce import find_output_type, output_types_of
from ensemble_ray.teamfile.fields import ItemPrompt
from ensemble_ray.values.task_output import full_name


class Fruit(BaseModel):
    """A type of this module."""

    name: str

    class Kernel(BaseModel):
        """A type within another one."""

        count: int


class Unused(BaseModel):
    """A type that no factory has to do with."""

    name: str


KINDS = {"fruit": Fruit}
MODELS = ModuleType("models")
MODELS.Fruit = Fruit  # type: ignore[attr-defined]  as `import models` has it


def of_type(kind: type[object] | UnionType | None) -> Task:
    """A task of that type."""
    return Task(description="d", expected_output="e", output_type=kind)


def by_helper(item: object) -> Task:
    """A factory that leaves the work to another function."""
    return by_name(item)


def by_name(_: object) -> Task:
    """A factory that names the class."""
    return of_type(Fruit)


def by_table(_: object) -> Task:
    """A factory that looks the class up."""
    return of_type(KINDS["fruit"])


def by_module(_: object) -> Task:
    """A factory that reaches the class by its module."""
    return of_type(MODELS.Fruit)  # type: ignore[attr-defined]


def by_inner(items: list[object]) -> list[Task]:
    """A factory with a function of its own."""
    return [of_type(Fruit) for _ in items]


def closed(kind: type[object]) -> Callable[[object], Task]:
    """A factory that has closed over the class."""
    return lambda _: of_type(kind)


class Maker:
    """A factory that is an object."""

    def __init__(self, kind: type[object]) -> None:
        self.kind = kind

    def __call__(self, item: object) -> Task:
        """Make the task."""
        del item
        return of_type(self.kind)

    def made(self, _: object) -> Task:
        """Make the task by a method."""
        return of_type(Fruit)


@pytest.mark.parametrize(
    "factory",
    [
        by_name,
        by_helper,
        by_table,
        by_module,
        by_inner,
        closed(Fruit),
        Maker(Fruit),
        Maker(Unused).made,
        functools.partial(by_name),
        ItemPrompt(Task(description="{item}", expected_output="e", output_type=Fruit)),
        lambda _: of_type(Fruit),
    ],
)
def test_class_is_found_however_a_factory_comes_to_it(factory: object) -> None:
    """S-MR-161: without a call of the factory."""
    assert output_types_of([factory])[full_name(Fruit)] is Fruit


def test_class_that_no_factory_refers_to_is_not_there() -> None:
    """S-MR-161: whatever the program has loaded."""
    found = output_types_of([by_name, None])

    assert full_name(Unused) not in found
    assert full_name(fractions.Fraction) not in found
    assert not [name for name in found if name.startswith("ensemble_ray.")]


def test_nested_and_plain_types_have_their_full_names() -> None:
    """S-CONV-10: as a record names them."""

    def nested(_: object) -> list[Task]:
        return [of_type(kind) for kind in (Fruit.Kernel, int)]

    assert output_types_of([closed(Fruit.Kernel)])[full_name(Fruit.Kernel)] is Fruit.Kernel
    assert output_types_of([nested])["builtins.int"] is int


Fruits = list[Fruit]


def by_alias(_: object) -> Task:
    """A factory that names an alias."""
    return of_type(Fruits)


@pytest.mark.parametrize(
    "kind",
    [
        list[Fruit],
        dict[str, Fruit | None],
        Fruit | None,
        Optional[list[Fruit]],  # noqa: UP045  its own way to write it
        tuple[int, Fruit],
        Literal["a", 1],
        Union[Fruit, str],  # noqa: UP007  same
        frozenset[Fruit],
        Sequence[Fruit],
        Mapping[str, Fruit],
    ],
    ids=str,
)
def test_type_made_of_known_classes_is_found_by_its_text(kind: type[object]) -> None:
    """S-LLM-56: a record names `list[module.Fruit]`; nothing is imported for it."""
    assert find_output_type(full_name(kind), output_types_of([by_name])) == kind


@pytest.mark.parametrize(
    "name",
    ["", "list[", "list[nowhere.Fruit]", "os.system", "list[os.system]", "nowhere.Fruit.<locals>.X", "1 | 2.5", "f()"],
)
def test_type_of_unknown_classes_is_not_found(name: str) -> None:
    """S-LLM-56: its values stay JSON data."""
    assert find_output_type(name, output_types_of([by_name])) is None


def test_alias_is_found_with_its_classes() -> None:
    """S-LLM-56."""
    found = output_types_of([by_alias])
    assert found[full_name(Fruits)] == Fruits
    assert found[full_name(Fruit)] is Fruit


@pytest.mark.parametrize("kind", [NewType("Ripe", Fruit), TypeAliasType("Basket", list[Fruit])], ids=str)  # type: ignore[valid-newtype]
def test_named_type_is_found(kind: object) -> None:
    """S-LLM-56."""
    assert find_output_type(full_name(kind), output_types_of([closed(cast("type[object]", kind))])) is kind


def test_search_ends_where_values_refer_to_each_other() -> None:
    """S-MR-161: a factory's module may be anything."""
    ring: list[object] = []
    ring.append(ring)

    def factory(_: object) -> Task:
        return of_type(Fruit if ring else None)

    assert full_name(Fruit) in output_types_of([factory])
