"""A directory of its own for every test, whose modules can be imported there and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ensemble_ray import Ensemble, ValidationError
from ensemble_ray.teamfile import load_ensemble
from tests.command_line import work_in

#: Makes a team from the text of a YAML file.
Load = Callable[[str], Ensemble]
#: The lines of the message with which a file is refused.
Refused = Callable[[str], list[str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory; what is imported from it is forgotten with the test."""
    yield from work_in(tmp_path, monkeypatch)


@pytest.fixture
def load(folder: Path) -> Load:
    """Loads a YAML text."""

    def load(text: str) -> Ensemble:
        (folder / "team.yaml").write_text(text, encoding="utf-8")
        return load_ensemble("team.yaml")

    return load


@pytest.fixture
def refused(load: Load) -> Refused:
    """Loads a YAML text that is refused."""

    def refused(text: str) -> list[str]:
        with pytest.raises(ValidationError) as caught:
            load(text)
        return [line.strip() for line in str(caught.value).splitlines()]

    return refused
