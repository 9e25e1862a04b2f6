"""What a team is called, and its tags."""

from __future__ import annotations

import pytest

from ensemble_ray import Ensemble, MapEnsemble, MapReduceEnsemble, Task, ValidationError
from ensemble_ray.definition.fields import Origin

TASK = Task.of("Say it")


def mapped(**fields: object) -> MapReduceEnsemble:
    """A map-reduce whose tree is made at construction."""
    return MapReduceEnsemble(
        items=[1, 2],
        map_task=lambda item: Task.of(f"Say {item}"),
        reduce_task=lambda group: Task.of("Join").replace(context=group),
        **fields,  # type: ignore[arg-type]
    )


def test_teams_of_every_kind_have_a_name_a_description_and_tags() -> None:
    """S-DOM-83: the tree of a map-reduce has those of the map-reduce."""
    given = {"name": "News desk", "description": "Writes the news", "tags": {"team": "news"}}
    made = (
        Ensemble(tasks=[TASK], **given),
        mapped(**given),
        mapped(**given).to_ensemble(),
        MapEnsemble(items=[1], map_task=lambda item: Task.of(f"Say {item}"), **given),
        Ensemble(tasks=[TASK], **given).replace(verbose=True),
    )
    for each in made:
        assert (each.name, each.description, each.tags) == tuple(given.values())
    bare = Ensemble(tasks=[TASK], tags=None)
    assert (bare.name, bare.description, bare.tags) == (None, None, {})


@pytest.mark.parametrize("name", ["", " ", " a", "a ", "a/b", "a,b", "a\nb", "-a", "..", "a\x1b[1m", "n" * 129])
def test_a_name_that_lists_and_urls_cannot_have_is_refused(name: str) -> None:
    """S-DOM-83: the message says what may be one."""
    with pytest.raises(ValidationError, match="Ensemble name must have 1 to 128 characters in one line without '/'"):
        Ensemble(tasks=[TASK], name=name)
    with pytest.raises(ValidationError, match="MapReduceEnsemble name must have"):
        mapped(name=name)


@pytest.mark.parametrize("name", ["a", "7", "Q&A (EU)", "news: today", "équipe", "n" * 128])
def test_other_names_are_taken_as_they_are(name: str) -> None:
    """S-DOM-83: any letters, and most signs."""
    assert Ensemble(tasks=[TASK], name=name).name == name


def test_tags_of_a_team_have_the_limits_of_those_of_a_run() -> None:
    """S-DOM-83, S-DUR-140: and the message names the team."""
    with pytest.raises(ValidationError, match="Ensemble tags must be at most 64, got: 65"):
        Ensemble(tasks=[TASK], tags={f"n{number}": "" for number in range(65)})
    with pytest.raises(ValidationError, match="Ensemble tags: the value of 'n'"):
        Ensemble(tasks=[TASK], tags={"n": "v" * 257})


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("/data/news.desk.yaml", "news.desk"),
        ("/odd:place/team.YML", "team"),
        ("shop.teams:support", "support"),
        ("shop:teams.support", "teams.support"),
        ("", ""),
    ],
)
def test_a_team_without_a_name_is_called_as_what_it_was_loaded_from(place: str, name: str) -> None:
    """S-DOM-84: its file, or the variable."""
    assert Origin(place=place).name == name
