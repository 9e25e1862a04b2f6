"""Review gates that wait in records: listed over all runs, decided by whoever comes, taken by the run when it goes on."""

from __future__ import annotations

import asyncio
import getpass
import itertools
import os
from pathlib import Path

import pytest

from ensemble_ray import (
    Ensemble,
    EnsembleError,
    EnsembleOutput,
    InlineRuntime,
    Review,
    ReviewDecidedError,
    ReviewDecision,
    ReviewRequest,
    ReviewRoleError,
    RunExistsError,
    RunState,
    Task,
    TaskHandlerContext,
    ValidationError,
    adecide,
    apending_reviews,
    aresume,
    decide,
    pending_reviews,
)
from ensemble_ray.execute.review.gates import TIMEOUT
from ensemble_ray.facts.runs import ReviewDecided
from ensemble_ray.record.open_reviews import fold_gates
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.values.value import utc_now

APPROVE = ReviewDecision.continue_execution()


class Team:
    """Two drafts with a gate behind each, and a letter that is made of both; counts what is done."""

    def __init__(self, *, review: Review | None = None) -> None:
        self.done: list[str] = []
        gate = review or Review.required("Is it polite?")
        self.drafts = [
            Task(name=name, description=f"Draft {name}", expected_output="A draft", handler=self._write, review=gate)
            for name in ("a", "b")
        ]
        self.letter = Task(
            name="letter", description="Letter", expected_output="It", handler=self._join, context=self.drafts
        )

    def _write(self, context: TaskHandlerContext) -> str:
        self.done.append(context.description)
        return f"text of {context.description}"

    def _join(self, context: TaskHandlerContext) -> str:
        self.done.append("Letter")
        return " + ".join(output.raw for output in context.context_outputs)

    def ensemble(self, **rules: object) -> Ensemble:
        """The team, which waits without a process."""
        tasks = [*self.drafts, self.letter]
        return Ensemble(**{"tasks": tasks, "workflow": "parallel", "review_wait": "detach", **rules})

    async def run(self, home: InlineRuntime, run_id: str = "run") -> EnsembleOutput:
        """Run it until it waits."""
        output = await self.ensemble().arun(runtime=home, run_id=run_id)
        assert output.state is RunState.WAITING
        return output


@pytest.fixture
def home(tmp_path: Path) -> InlineRuntime:
    """Records of its own."""
    return InlineRuntime(home=tmp_path)


async def _gates(home: InlineRuntime) -> dict[str, str]:
    """Ids of the gates that wait, by the descriptions of their tasks."""
    return {review.task_description: review.gate_id for review in await apending_reviews(runtime=home)}


# Lists.


async def test_gates_of_all_runs_are_listed_oldest_first(home: InlineRuntime) -> None:
    """S-REV-125: with the fields that the waiting output has."""
    assert await apending_reviews(runtime=home) == ()
    outputs = [await Team().run(home, run_id) for run_id in ("one", "two")]
    pending = await apending_reviews(runtime=home)
    assert [review.run_id for review in pending] == ["one", "one", "two", "two"]
    assert {review.task_description for review in pending[:2]} == {"Draft a", "Draft b"}  # they are asked side by side
    assert [review.created_at for review in pending] == sorted(review.created_at for review in pending)
    assert {review.gate_id: review for review in pending} == {
        review.gate_id: review for output in outputs for review in output.open_reviews
    }


# Decisions, and what becomes of them.


@pytest.mark.parametrize("order", list(itertools.permutations(("Draft a", "Draft b"))))
async def test_gates_are_decided_in_any_order(home: InlineRuntime, order: tuple[str, str]) -> None:
    """S-REV-17, S-REV-130: one at a time, with a resumption between them; nothing is done or asked twice."""
    team = Team()
    await team.run(home)
    gates = await _gates(home)
    for position, task in enumerate(order):
        state = await adecide("run", gates[task], ReviewDecision.edit(f"{task}, edited"), by="Ann", runtime=home)
        assert state is RunState.WAITING
        output = await aresume("run", team.ensemble(), runtime=home)
        assert output.state is (RunState.COMPLETED if position else RunState.WAITING)
    assert output.raw == "Draft a, edited + Draft b, edited"
    assert sorted(team.done) == ["Draft a", "Draft b", "Letter"]
    assert await apending_reviews(runtime=home) == ()


async def test_both_are_decided_before_the_run_goes_on(home: InlineRuntime) -> None:
    """S-REV-130: one resumption takes all decisions."""
    team = Team()
    await team.run(home)
    for gate in (await _gates(home)).values():
        await adecide("run", gate, APPROVE, runtime=home)
    output = await aresume("run", team.ensemble(), runtime=home)
    assert (output.state, output.raw) == (RunState.COMPLETED, "text of Draft a + text of Draft b")


async def test_exit_ends_the_run_with_what_is_done(home: InlineRuntime) -> None:
    """S-REV-127, S-REV-32: as a handler's."""
    team = Team()
    await team.run(home)
    gates = await _gates(home)
    await adecide("run", gates["Draft a"], ReviewDecision.exit_early(), runtime=home)
    output = await aresume("run", team.ensemble(), runtime=home)
    assert output.exit_reason == "user_exit_early"
    assert [each.raw for each in output.completed_tasks] == ["text of Draft a"]
    with pytest.raises(ValidationError, match="Run 'run' has ended: it is completed, and its gates accept no decision"):
        await adecide("run", gates["Draft b"], APPROVE, runtime=home)


async def test_decision_is_told_with_who_and_why(home: InlineRuntime) -> None:
    """S-REV-127, S-REV-133: in the trace of the run; by default the user of the process."""
    team = Team()
    await team.run(home)
    gates = await _gates(home)
    await adecide("run", gates["Draft a"], APPROVE, by="Ann", comment="kind enough", runtime=home)
    await adecide("run", gates["Draft b"][:20], APPROVE, runtime=home)
    output = await aresume("run", team.ensemble(), runtime=home)
    first, second = (output[task].trace.metadata["reviews"][0] for task in team.drafts)
    assert (first["verdict"], first["by"], first["comment"]) == ("approve", "Ann", "kind enough")
    assert (second["by"], "comment" in second) == (getpass.getuser(), False)


async def test_role_that_a_gate_requires_is_checked_when_roles_are_stated(home: InlineRuntime) -> None:
    """S-QUO-50, S-QUO-54, S-REV-70: without `roles` a program decides as before, and no role is recorded."""
    team = Team(review=Review(prompt="Polite?", timeout=0, required_role="legal"))
    await team.run(home)
    gates = await _gates(home)
    for roles in ([], ["lead"], "lead"):
        with pytest.raises(ReviewRoleError, match="requires the role 'legal'") as told:
            await adecide("run", gates["Draft a"], APPROVE, roles=roles, runtime=home)
        error = told.value
        assert (error.run_id, error.gate_id, error.role) == ("run", gates["Draft a"], "legal")
        assert error.roles == (() if roles == [] else ("lead",))
    await adecide("run", gates["Draft a"], APPROVE, roles="legal", runtime=home)
    await adecide("run", gates["Draft b"], APPROVE, runtime=home)
    facts = await SqliteStore(Path(home.store_address.home)).gates_of("run")
    decided = [fact.data for fact in facts if isinstance(fact.data, ReviewDecided)]
    assert [each.role for each in decided] == ["legal", None]
    assert (await aresume("run", team.ensemble(), runtime=home)).is_complete


async def test_who_comes_second_is_told_who_was_first(home: InlineRuntime) -> None:
    """S-REV-128: with what, when and why; also when the run has gone on and ended."""
    team = Team()
    await team.run(home)
    gates = await _gates(home)
    for gate in gates.values():
        await adecide("run", gate, ReviewDecision.edit("x"), by="Ann", comment="shorter", runtime=home)
    for _ in range(2):
        with pytest.raises(ReviewDecidedError, match=r'has been decided: edit, by Ann at .* UTC \("shorter"\)') as told:
            await adecide("run", gates["Draft a"], APPROVE, by="Bob", runtime=home)
        error = told.value
        assert (error.run_id, error.gate_id, error.verdict, error.by, error.comment) == (
            "run", gates["Draft a"], "edit", "Ann", "shorter"
        )  # fmt: skip
        assert error.decided_at is not None
        await aresume("run", team.ensemble(), runtime=home)


async def test_many_decide_at_once_and_one_counts(home: InlineRuntime) -> None:
    """S-REV-128: and the run goes on with that one."""
    team = Team()
    await team.run(home)
    gates = await _gates(home)
    people = [f"person {number}" for number in range(6)]
    asked = [adecide("run", gates["Draft a"], ReviewDecision.edit(who), by=who, runtime=home) for who in people]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    (winner,) = (who for who, outcome in zip(people, outcomes, strict=True) if outcome is RunState.WAITING)
    assert {outcome.by for outcome in outcomes if isinstance(outcome, ReviewDecidedError)} == {winner}
    await adecide("run", gates["Draft b"], APPROVE, runtime=home)
    assert (await aresume("run", team.ensemble(), runtime=home)).raw == f"{winner} + text of Draft b"


async def test_what_follows_from_the_timeout_is_told_when_it_has_passed(home: InlineRuntime) -> None:
    """S-REV-128, S-REV-84: nobody decides any more, and the run applies it when it goes on."""
    team = Team(review=Review(timeout=0.001, on_timeout="continue"))
    await team.run(home)
    pending = await apending_reviews(runtime=home)
    while any(review.expires_at is None or review.expires_at > utc_now() for review in pending):  # noqa: ASYNC110  for an instant
        await asyncio.sleep(0)
    for review in pending:
        with pytest.raises(
            ReviewDecidedError, match=r"on_timeout=continue applies.*ensemble_ray\.resume\('run', ensemble\)"
        ) as told:
            await adecide("run", review.gate_id, ReviewDecision.exit_early(), runtime=home)
        assert (told.value.verdict, told.value.by, told.value.decided_at) == ("continue", TIMEOUT, review.expires_at)
    output = await aresume("run", team.ensemble(), runtime=home)
    assert (output.state, output.raw) == (RunState.COMPLETED, "text of Draft a + text of Draft b")


# Runs whose process waits for its own handler.


async def test_gate_of_a_run_that_asks_its_handler_is_decided_there_alone(home: InlineRuntime) -> None:
    """S-REV-129: it is listed, and who decides elsewhere is told where to."""
    is_asked, answer = asyncio.Event(), asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    async def ask(_: ReviewRequest) -> ReviewDecision:
        loop.call_soon_threadsafe(is_asked.set)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_result(answer), loop))

    team = Team()
    running = asyncio.create_task(
        team.ensemble(review_wait="attached", review_handler=ask).arun(runtime=home, run_id="run")
    )
    await is_asked.wait()
    # The other task's gate may be the first, and a gate is not committed immediately.
    while "Draft a" not in (gates := await _gates(home)):  # noqa: ASYNC110  no event says that a fact is committed
        await asyncio.sleep(0.01)
    with pytest.raises(
        RunExistsError, match=rf"is asked in process {os.getpid()} on .*decide there.*review_wait='detach'"
    ):
        await adecide("run", gates["Draft a"], APPROVE, runtime=home)
    answer.set_result(APPROVE)
    assert (await running).raw == "text of Draft a + text of Draft b"


async def test_handler_of_a_run_that_goes_on_attached_decides_from_then_on(home: InlineRuntime) -> None:
    """S-REV-130: what somebody decided before counts, and what is asked now is for the handler alone."""
    team = Team()
    await team.run(home)
    gates = await _gates(home)
    await adecide("run", gates["Draft a"], ReviewDecision.edit("a, by Ann"), by="Ann", runtime=home)
    asked: list[str] = []
    refused: list[BaseException] = []

    async def ask(request: ReviewRequest) -> ReviewDecision:
        asked.append(request.task_description)
        try:
            await adecide("run", request.review_id, APPROVE, runtime=home)
        except RunExistsError as error:
            refused.append(error)
        return ReviewDecision.edit("b, by the handler")

    output = await aresume("run", team.ensemble(review_wait="attached", review_handler=ask), runtime=home)
    assert (asked, len(refused)) == (["Draft b"], 1)
    assert output.raw == "a, by Ann + b, by the handler"


async def _result(future: asyncio.Future[ReviewDecision]) -> ReviewDecision:
    return await future


# What is wrong.


async def test_what_is_no_gate_or_decision_is_refused(home: InlineRuntime) -> None:
    """S-REV-128: each message says what there is, and what to do."""
    await Team().run(home)
    first, second = [review.gate_id for review in await apending_reviews(runtime=home)]
    with pytest.raises(ValidationError, match=r"Unknown run 'runn' in .*Nearest: \[run\]"):
        await adecide("runn", first, APPROVE, runtime=home)
    with pytest.raises(ValidationError, match=rf"Run 'run' has no gate 'x'\. Open gates: \[{first}, {second}\]"):
        await adecide("run", "x", APPROVE, runtime=home)
    with pytest.raises(ValidationError, match=r"Run 'run' has no gate ''\. Open gates"):
        await adecide("run", "", APPROVE, runtime=home)
    with pytest.raises(ValidationError, match=r"decision must be a ReviewDecision, got: str\. Use ReviewDecision\.con"):
        await adecide("run", first, "approve", runtime=home)  # type: ignore[arg-type]
    assert len(await apending_reviews(runtime=home)) == 2


async def test_gate_is_refused_when_its_task_failed_meanwhile(home: InlineRuntime) -> None:
    """S-REV-126: such as by an error of the handler that was asked."""

    def fail(_: ReviewRequest) -> ReviewDecision:
        raise OSError("no terminal")

    draft = Task(
        name="draft", description="Draft", expected_output="It", handler=lambda _: "x", review=Review.required()
    )
    with pytest.raises(EnsembleError):
        await Ensemble(tasks=[draft], review_handler=fail).arun(runtime=home, run_id="failed")
    (gate,) = fold_gates(await SqliteStore(Path(home.store_address.home)).gates_of("failed"))
    with pytest.raises(ValidationError, match="accepts no decision: its task or call has ended without one"):
        await adecide("failed", gate.gate_id, APPROVE, runtime=home)


def test_calls_without_await_do_the_same(tmp_path: Path) -> None:
    """S-REV-125, S-REV-127: in the store that the environment names, or that of a runtime."""
    home, team = InlineRuntime(home=tmp_path), Team()
    team.ensemble().run(runtime=home, run_id="run")
    first, second = pending_reviews(runtime=home)
    for review in (first, second):
        assert decide("latest", review.gate_id, APPROVE, runtime=home) is RunState.WAITING
    assert pending_reviews(runtime=home) == ()
