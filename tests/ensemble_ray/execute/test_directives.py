"""Which directives the prompt of a task shows, at first and where it goes on."""

from __future__ import annotations

import pytest

from ensemble_ray import ValidationError
from ensemble_ray.facts.runs import DirectivesShown
from ensemble_ray.testing import ScriptedModel
from ensemble_ray.values.reviews import LONGEST_DIRECTIVE, check_directive
from tests.ensemble_ray.execute.running import Bench, writer

SECTION = "## Active Directives\n- Be brief\n- In French\n\n## Task"


def bench(known: Bench | None = None) -> tuple[Bench, ScriptedModel]:
    """A task whose model answers once; with what another one recorded."""
    model = ScriptedModel("Text")
    facts = () if known is None else [fact for fact in known.journal.facts() if fact.kind != "output"]
    return Bench(agents={"draft": writer(model)}, known=facts), model


async def test_a_task_is_told_and_that_is_recorded() -> None:
    """S-CTL-5, S-CTL-6, S-TPL-57: before its model is asked."""
    made, model = bench()
    await made.run(directives=("Be brief", "In French"))
    assert SECTION in model.calls[0].text
    kinds = [(fact.kind, fact.name) for fact in made.journal.facts()]
    assert kinds[:2] == [("directives_shown", "draft#0/0/directives"), ("model", "draft#0/0/model")]


async def test_a_task_without_directives_records_nothing_of_them() -> None:
    """S-CTL-6: and its prompt has no such section."""
    made, model = bench()
    await made.run()
    assert "Directives" not in model.calls[0].text
    assert not any(isinstance(fact.data, DirectivesShown) for fact in made.journal.facts())


async def test_a_task_that_goes_on_is_told_what_it_was_told_before() -> None:
    """S-CTL-6: also where others are active by now."""
    before, _ = bench()
    await before.run(directives=("Be brief", "In French"))
    known = [fact for fact in before.journal.facts() if isinstance(fact.data, DirectivesShown)]
    model = ScriptedModel("Text")
    again = Bench(agents={"draft": writer(model)}, known=known)
    await again.run(directives=("Something else",), epoch=1)
    assert SECTION in model.calls[0].text
    assert "Something else" not in model.calls[0].text


async def test_a_task_whose_model_was_asked_is_not_told_of_later_ones() -> None:
    """S-CTL-6: its answers were given to a prompt without them."""
    before, _ = bench()
    await before.run()
    again, model = bench(before)
    result = await again.run(directives=("Something else",), epoch=1)
    assert (result.status, model.calls) == ("completed", ())
    assert not any(isinstance(fact.data, DirectivesShown) for fact in again.journal.facts())


@pytest.mark.parametrize(
    ("text", "ttl"), [(" \n", None), ("a" * (LONGEST_DIRECTIVE + 1), None), ("a", 0), ("a", -1.0), ("a", float("inf"))]
)
def test_what_is_no_directive_is_refused(text: str, ttl: float | None) -> None:
    """S-CTL-4."""
    with pytest.raises(ValidationError):
        check_directive(text, ttl)
