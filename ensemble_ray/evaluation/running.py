"""Run the cases of an evaluation, resume runs of earlier starts, and score the outputs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from msgspec import Struct

from ensemble_ray.definition.fields import Durability
from ensemble_ray.definition.redactor import recorded_redaction
from ensemble_ray.definition.run_options import RunOptions, has_tag
from ensemble_ray.ensemble import Ensemble, join_run
from ensemble_ray.errors import RecordError, ValidationError, message_of
from ensemble_ray.evaluation.cases import Case, PlacedCase, check_inputs_of, refuse_cases
from ensemble_ray.evaluation.judging import Judge, judging_digest, judging_inputs, judging_team, verdict_in
from ensemble_ray.evaluation.results import (
    CASE,
    EVALUATION,
    JUDGE,
    LONGEST_OUTPUT,
    PART,
    REPEAT,
    CaseResult,
    CaseRun,
    EvaluationResult,
    RunScore,
    derived_run_id,
    results_run_id,
    store_result,
)
from ensemble_ray.evaluation.scorers import RegexMatch, Scorer, score_of
from ensemble_ray.evaluation.statistics import require_scipy
from ensemble_ray.plan.planner import Planned, needs_synthesis
from ensemble_ray.ports import ChatModel
from ensemble_ray.process.concurrency import USER_ERRORS, threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.run_context import check_deps
from ensemble_ray.record.head import RunHead, head_facts, read_head
from ensemble_ray.record.history.run_history import RunHistory
from ensemble_ray.record.identity.definition import digest_of, run_data
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.resume.reading import what_differs
from ensemble_ray.record.stores import RecordedRun, RunStore
from ensemble_ray.record.trace import output_of, trace_of
from ensemble_ray.recovery.resuming import plan_again, redaction_again, start_resumed
from ensemble_ray.runs.inline import InlineRuntime
from ensemble_ray.runs.launching import name_of
from ensemble_ray.runs.planned import check
from ensemble_ray.runs.ports import Runtime
from ensemble_ray.text.redaction import Redaction
from ensemble_ray.values.metrics import ExecutionMetrics
from ensemble_ray.values.outputs import EnsembleOutput, RunState
from ensemble_ray.values.task_output import OutputType
from ensemble_ray.values.trace import jsonable

_log = bounded_logger(__name__)
_READERS = 8  # records that are read at the same time
#: A run in these states is not continued.
_ENDED = frozenset({RunState.COMPLETED, RunState.FAILED, RunState.BUDGET_EXHAUSTED})


class EvaluationWork(Struct, frozen=True, kw_only=True):
    """The definition of an evaluation: of a team, or of recorded runs."""

    id: str
    team: Ensemble | None
    cases: Sequence[PlacedCase]
    scorers: Sequence[Scorer]
    repeats: int
    concurrency: int
    options: RunOptions | None
    retries_failed: bool
    runs: Sequence[str] = ()  # ids of recorded runs, their starts, or `tag=VALUE`


class CaseProgress(Struct, frozen=True, kw_only=True):
    """A run of a case that was scored just now.

    Attributes:
        done: Scored runs of this start, with this one.
        total: All runs of the evaluation: cases times repeats.
        case: Id of the case.
        run: The run, with its scores.
        is_recorded: Whether the run had ended before this start of the evaluation.
    """

    done: int
    total: int
    case: str
    run: CaseRun
    is_recorded: bool


class _Layout(Struct, frozen=True, kw_only=True):
    """The part of a plan that an output needs, by task: a plan of each case would fill the memory."""

    types: Mapping[str, OutputType]
    object_ids: Mapping[str, str]


class _Slot(Struct, kw_only=True):
    case: Case
    repeat: int
    run_id: str
    is_ended: bool = False
    layout: _Layout | None = None  # of an ended run of the team
    redaction: Redaction | None = None  # of its run


class _Read(Struct, frozen=True, kw_only=True):
    """A recorded run."""

    state: RunState
    output: EnsembleOutput | None
    metrics: ExecutionMetrics
    duration_s: float | None
    error: str
    redaction: Redaction | None


class RunningEvaluation:
    """One start of an evaluation, on the library's loop."""

    def __init__(self, work: EvaluationWork, runtime: Runtime, report: Callable[[CaseProgress], object]) -> None:
        self._work = work
        self._team = None if work.team is None else work.team.with_options(work.options)
        self._runtime = runtime
        self._report = report
        self._store: RunStore = store_at(runtime.store_address)
        self._places = asyncio.Semaphore(work.concurrency)
        self._done = 0
        self._total = 0
        self._currency = ""
        self._recorded_team = ""
        redactor = None if work.team is None else work.team.redactor
        #: For cases of runs without a readable record: the result is a record, too.
        self._redaction = None if redactor is None else redactor.begin(results_run_id(work.id))
        address = runtime.store_address
        is_inline = isinstance(runtime, InlineRuntime)
        self._judging: Runtime = runtime if is_inline else InlineRuntime(home=address.home, store=address.url)

    async def execute(self) -> EvaluationResult:
        """Return the result, which is stored.

        Raises:
            ValidationError: cases, scorers or recorded runs do not fit; no model was called.
        """
        require_scipy()
        slots = await self._recorded_slots() if self._team is None else await self._planned_slots(self._team)
        cases = list({id(slot.case): slot.case for slot in slots}.values())
        self._check_scorers(cases)
        self._total = len(slots)
        pending = [asyncio.create_task(self._evaluate(slot)) for slot in slots]
        try:
            runs = await asyncio.gather(*pending)
        except BaseException:
            for each in pending:
                each.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            raise
        result = self._result(cases, slots, runs)
        await store_result(result, self._runtime.store_address)
        return result

    # Checks before the first model call.

    def _check_scorers(self, cases: Sequence[Case]) -> None:
        places = {id(each.case): each.place for each in self._work.cases}
        refuse_cases([
            f"{places.get(id(case), f'case {case.id}')}: {problem}"
            for case in cases
            for scorer in self._work.scorers
            if (problem := scorer.problem(case) or self._problem_of_expression(scorer, case))
        ])  # fmt: skip
        for scorer in self._work.scorers:
            if isinstance(scorer, Judge):
                judging_team(scorer, self._team_model)

    def _problem_of_expression(self, scorer: Scorer, case: Case) -> str:
        """Refuse an expression that its placeholder, `[EMAIL_...]`, would turn into a set of characters."""
        if self._redaction is None or not isinstance(scorer, RegexMatch) or scorer.pattern is not None:
            return ""
        if not self._redaction.holds_value(str(case.expected)):
            return ""
        return (
            f"the scorer '{scorer.label}': 'expected' contains a value that the redactor of the team replaces. "
            r"What to do: match the placeholder, such as \[EMAIL_\w+\]"
        )

    @property
    def _team_model(self) -> ChatModel | None:
        return None if self._work.team is None else self._work.team.llm

    async def _planned_slots(self, team: Ensemble) -> list[_Slot]:
        if team.durability is Durability.OFF:
            raise ValidationError(
                "An evaluation reads the records of its runs, and durability is 'off'. Use 'effects' or 'run'"
            )
        refuse_cases(check_inputs_of(self._work.cases, team))
        for each in self._work.cases[:1]:  # validates the team
            await threads.run(check, team, each.case.inputs)
        readers = asyncio.Semaphore(_READERS)

        async def find(case: Case, repeat: int) -> _Slot:
            async with readers:
                return await self._find(team, case, repeat)

        repeats = range(1, self._work.repeats + 1)
        slots = await asyncio.gather(*(find(each.case, repeat) for each in self._work.cases for repeat in repeats))
        if not all(slot.is_ended for slot in slots):
            check_deps(team.deps, team.deps_type, "Evaluation: its team")
        return slots

    async def _find(self, team: Ensemble, case: Case, repeat: int) -> _Slot:
        """Return the run of a case that counts: the last attempt, or a new one."""
        inputs = digest_of({"inputs": dict(case.inputs)})
        run_id, found = await self._last_attempt(case.id, inputs, repeat)
        if found is None:
            return _Slot(case=case, repeat=repeat, run_id=run_id)
        facts = await head_facts(self._store, run_id)
        head = RunHead(facts)
        if head.header.is_empty:
            return _Slot(case=case, repeat=repeat, run_id=run_id)
        if needs_synthesis(team.all_tasks):
            facts = await self._store.facts(run_id)  # with the answers that made agents
        planned = await plan_again(team, case.inputs, facts, head.header)
        if different := what_differs(head.header, run_data(planned, team)):
            raise ValidationError(
                f"Evaluation '{self._work.id}' began with another team, so it cannot continue: {different[0]}. "
                "What to do: choose another id"
            )
        if found.state not in _ENDED:
            return _Slot(case=case, repeat=repeat, run_id=run_id)
        return _Slot(case=case, repeat=repeat, run_id=run_id, is_ended=True, layout=_layout_of(planned))

    async def _last_attempt(self, *parts: object) -> tuple[str, RecordedRun | None]:
        """Return the run that counts: the last of its failed attempts, or a further one if failed runs are retried."""
        last: tuple[str, RecordedRun | None] | None = None
        for attempt in count():
            run_id = derived_run_id(self._work.id, *parts, attempt)
            found = await self._store.summary(run_id)
            if found is None:
                return (run_id, None) if last is None or self._work.retries_failed else last
            last = run_id, found
            if found.state not in {RunState.FAILED, RunState.BUDGET_EXHAUSTED}:
                return last
        raise AssertionError("unreachable")

    async def _recorded_slots(self) -> list[_Slot]:
        """Return the recorded runs, each with the case of its tag, of equal inputs, or one without an expected output."""
        by_id = {each.case.id: each.case for each in self._work.cases}
        by_inputs = {digest_of(each.case.shown_inputs()): each.case for each in self._work.cases}
        slots, repeats = list[_Slot](), Counter[str]()
        for run_id, head in await self._find_recorded():
            self._recorded_team = self._recorded_team or head.name
            inputs = dict(head.header.inputs or {})
            named = head.tags.get(CASE, "")
            case = by_id.get(named) or by_inputs.get(digest_of(inputs))
            if case is None and self._work.cases:
                raise ValidationError(
                    f"Run '{run_id}' is of no case: no case has its inputs, and its tag '{CASE}' names none"
                )
            if case is None:
                case = by_id.setdefault(named, Case(named, inputs)) if named else Case(run_id, inputs)
            repeats[case.id] += 1
            slots.append(_Slot(case=case, repeat=repeats[case.id], run_id=run_id, is_ended=True))
        return slots

    async def _find_recorded(self) -> list[tuple[str, RunHead]]:
        named = [each for each in self._work.runs if "=" not in each]
        found = [
            (run.run_id, await read_head(self._store, run.run_id))
            for each in named
            if (run := await self._store.find(each))
        ]
        tags = [each for each in self._work.runs if "=" in each]
        if tags:
            readers = asyncio.Semaphore(_READERS)

            async def read(run: RecordedRun) -> tuple[str, RunHead] | None:
                async with readers:
                    try:
                        head = await read_head(self._store, run.run_id)
                    except RecordError as error:
                        _log.warning(
                            "Cannot read run %s, so the evaluation omits it: %s", run.run_id, message_of(error)
                        )
                        return None
                matches = all(has_tag(head.tags, each, separator="=") for each in tags)
                return (run.run_id, head) if matches and PART not in head.tags else None

            runs = [run for run in await self._store.runs() if not run.state.is_active]
            found += [each for each in await asyncio.gather(*map(read, reversed(runs))) if each is not None]
        if not found:
            raise ValidationError(f"No ended run matches [{', '.join(self._work.runs)}]")
        # Of several attempts at a repeat of a case, the last one counts.
        names = (EVALUATION, CASE, REPEAT)
        attempts = {tuple(head.tags.get(name, run_id) for name in names): (run_id, head) for run_id, head in found}
        return list(attempts.values())

    # One case.

    async def _evaluate(self, slot: _Slot) -> CaseRun:
        async with self._places:
            problem = ""
            if not slot.is_ended and self._work.team is not None:
                tags = {EVALUATION: self._work.id, CASE: slot.case.id, REPEAT: str(slot.repeat)}
                given = self._work.options or RunOptions()
                options = given.replace(tags={**(given.tags or {}), **tags})
                problem = await self._run(self._work.team, slot.case.inputs, slot.run_id, self._runtime, options)
            read = await self._read(slot.run_id, self._team, slot.case.inputs, problem, slot.layout)
            slot.redaction, scores = read.redaction, dict[str, RunScore]()
            if read.output is not None:
                case = _clean_case(slot.case, slot.redaction)
                for scorer in self._work.scorers:
                    scores[scorer.label] = await self._score(scorer, slot, case, read.output)
        run = CaseRun(
            run_id=slot.run_id,
            repeat=slot.repeat,
            state=read.state.value,
            output="" if read.output is None else read.output.raw[:LONGEST_OUTPUT],
            error=read.error,
            duration_s=read.duration_s,
            tokens=read.metrics.total_tokens if read.metrics.total_tokens >= 0 else None,
            cost=self._cost_of(read.metrics),
            scores=scores,
        )
        self._done += 1
        progress = CaseProgress(
            done=self._done, total=self._total, case=slot.case.id, run=run, is_recorded=slot.is_ended
        )
        try:
            self._report(progress)
        except USER_ERRORS as error:
            _log.warning("on_progress raised %s: %s", type(error).__name__, message_of(error))
        return run

    async def _run(
        self, team: Ensemble, inputs: Mapping[str, object], run_id: str, runtime: Runtime, options: RunOptions
    ) -> str:
        """Run to the end, or resume; return the error, which the record may lack."""
        try:
            found = await self._store.summary(run_id)
            if found is None or (await read_head(self._store, run_id)).header.is_empty:
                begun = team.begin(inputs, runtime=runtime, run_id=run_id, options=options, is_watched=False)
            else:
                begun = await start_resumed(run_id, team, runtime=runtime, options=options)
            await join_run(begun)
        except Exception as error:  # noqa: BLE001  one run does not end the evaluation
            return f"{type(error).__name__}: {message_of(error)}"
        return ""

    async def _read(
        self,
        run_id: str,
        team: Ensemble | None,
        inputs: Mapping[str, object],
        problem: str,
        layout: _Layout | None = None,
    ) -> _Read:
        """Read a run that ended. `problem` explains a run without a recorded reason."""
        try:
            return await self._read_record(run_id, team, inputs, problem, layout)
        except (RecordError, ValidationError) as error:
            return _Read(
                state=RunState.FAILED,
                output=None,
                metrics=ExecutionMetrics.EMPTY,
                duration_s=None,
                error=problem or f"its record cannot be read: {message_of(error)}",
                redaction=None,
            )

    async def _read_record(
        self,
        run_id: str,
        team: Ensemble | None,
        inputs: Mapping[str, object],
        problem: str,
        layout: _Layout | None,
    ) -> _Read:
        facts = await self._store.facts(run_id)
        if not facts:
            raise RecordError(problem or f"Run '{run_id}' has no recorded facts")
        history = RunHistory(facts, has_details=True)
        state, header = history.head.state, history.head.header
        if state is RunState.INTERRUPTED and (summary := await self._store.summary(run_id)) is not None:
            state = summary.state  # such as `waiting`
        redaction: Redaction | None = None
        if header.redaction is not None:
            redaction = recorded_redaction(header.redaction) if team is None else redaction_again(run_id, team, header)
        if state is not RunState.COMPLETED:
            trace, reason = trace_of(history), history.head.errors
            recorded = f"{reason[0].error_type}: {reason[0].message}" if reason else ""
            explained = f"the run ended with the state {state.value}"
            if state is RunState.WAITING:
                explained = "the run waits for a review: decide it, then start the evaluation again"
            duration_s = trace.total_duration.total_seconds()
            error = recorded or problem or explained
            return _Read(
                state=state, output=None, metrics=trace.metrics, duration_s=duration_s, error=error, redaction=redaction
            )
        if layout is None and team is not None:
            layout = _layout_of(await plan_again(team, inputs, facts, header))
        output = output_of(history) if layout is None else output_of(history, layout.types, layout.object_ids)
        duration_s = output.total_duration.total_seconds()
        return _Read(
            state=state, output=output, metrics=output.metrics, duration_s=duration_s, error="", redaction=redaction
        )

    async def _score(self, scorer: Scorer, slot: _Slot, case: Case, output: EnsembleOutput) -> RunScore:
        try:
            if isinstance(scorer, Judge):
                return await self._judge(scorer, slot, case, output)
            found = score_of(await scorer.score(output, case), scorer.label)
        except USER_ERRORS as error:  # it may be the user's code
            return RunScore(value=None, error=f"{type(error).__name__}: {message_of(error)}")
        return RunScore(value=found.value, reason=found.reason)

    async def _judge(self, judge: Judge, slot: _Slot, case: Case, output: EnsembleOutput) -> RunScore:
        team = judging_team(judge, self._team_model)
        inputs = judging_inputs(judge, output, case)
        question = (JUDGE, judge.label, slot.run_id, judging_digest(team, inputs))
        run_id, found = await self._last_attempt(*question)
        problem = ""
        if found is None or found.state not in _ENDED:
            tags = {EVALUATION: self._work.id, CASE: slot.case.id, REPEAT: str(slot.repeat), PART: JUDGE}
            problem = await self._run(team, inputs, run_id, self._judging, RunOptions(tags=tags))
        read = await self._read(run_id, team, inputs, problem)
        spent = self._cost_of(read.metrics)
        if read.output is None:
            return RunScore(value=None, error=read.error, run_id=run_id, cost=spent)
        score = verdict_in(read.output)
        return RunScore(value=score.value, reason=score.reason, run_id=run_id, cost=spent)

    def _cost_of(self, metrics: ExecutionMetrics) -> str:
        """Return a cost as text; empty if its currency is not the first cost's, because their sum has no meaning."""
        cost = metrics.total_cost_estimate
        if cost is None:
            return ""
        self._currency = self._currency or cost.currency
        return f"{cost.total_cost:f}" if cost.currency == self._currency else ""

    def _result(self, cases: Sequence[Case], slots: Sequence[_Slot], runs: Sequence[CaseRun]) -> EvaluationResult:
        by_case: dict[int, list[CaseRun]] = {}
        shown: dict[int, Case] = {}  # with the placeholders of the first run
        for slot, run in zip(slots, runs, strict=True):
            by_case.setdefault(id(slot.case), []).append(run)
            shown.setdefault(id(slot.case), _clean_case(slot.case, slot.redaction or self._redaction))
        team = self._work.team
        return EvaluationResult(
            id=self._work.id,
            team=self._recorded_team if team is None else name_of(team, team.source) or "team",
            scorers=tuple(each.label for each in self._work.scorers),
            repeats=max(map(len, by_case.values())),
            currency=self._currency or "USD",
            cases=tuple(
                CaseResult(
                    id=case.id,
                    inputs=shown[id(case)].shown_inputs(),
                    expected=jsonable(shown[id(case)].expected),
                    tags=tuple(case.tags),
                    runs=tuple(by_case[id(case)]),
                )
                for case in cases
            ),
        )


def _layout_of(planned: Planned) -> _Layout:
    return _Layout(
        types={key: task.output_type for key, task in planned.tasks.items() if task.output_type is not None},
        object_ids={node.key: node.object_id for node in planned.plan.nodes},
    )


def _clean_case(case: Case, redaction: Redaction | None) -> Case:
    """Return the case with placeholders in place of values (S-EVL-27)."""
    if redaction is None:
        return case
    return case.replace(inputs=redaction.clean_data(case.inputs), expected=redaction.clean_data(case.expected))
