"""A run of a plan with units, made by its source and handlers of the test: what its caller gets, and what its record holds."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ensemble_ray import AgentExecutionError, EnsembleOutput, Plan, TaskOutput
from ensemble_ray.execute.orders import FailedTask, RunOutcome, TaskFailure
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import FailureRecorded, OutputRecorded, PlanRecorded, RunEnded
from ensemble_ray.record.result import RunResultHead, assemble
from ensemble_ray.runs.planned import conclude
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import End, Start
from ensemble_ray.schedule.stimuli import Begun, Completed, Exited, Failed, Stimulus, encode_stimulus
from ensemble_ray.values.error_data import error_data
from ensemble_ray.values.ids import RUN
from tests.ensemble_ray.record.units.plans import output

#: What an execution does: "" completes, `fail` fails, `exit` ends the run.
Does = Callable[[str], str]


@dataclass(kw_only=True)
class Walked:
    """A run that ended, or was torn after some stimuli."""

    plan: Plan
    facts: list[Fact]
    outcome: RunOutcome | None = None
    outputs: dict[str, TaskOutput] = field(default_factory=dict)

    def output(self) -> EnsembleOutput:
        """What the caller of the run gets."""
        assert self.outcome is not None
        concluded = conclude(self.plan, self.outcome)
        description = RunResultHead(run_id="run-1", workflow=self.plan.shown_workflow)
        return assemble(description, concluded.results, concluded.end, concluded.failure)


def walked(plan: Plan, does: Does = lambda _: "", *, torn_after: int | None = None) -> Walked:
    """Run a plan; each task takes a second, and its output is its instance."""
    source = machine_for(plan)
    facts = [_fact(RUN, 0.0, PlanRecorded.from_data({"plan": plan.to_dict(), "ensemble_id": "run-1"}, 0.0))]
    run = Walked(plan=plan, facts=facts)
    failures: list[FailedTask[TaskFailure]] = []
    unfinished: list[tuple[str, TaskFailure]] = []
    told: list[Stimulus] = [Begun(at=0.0)]
    at, count = 0.0, 0
    while told:
        stimulus = told.pop(0)
        facts.append(_fact(getattr(stimulus, "instance", RUN), stimulus.at, encode_stimulus(stimulus)))
        count += 1
        if torn_after is not None and count > torn_after:  # how many, the beginning of the run not counted
            return run
        for wanted in source.handle(stimulus):
            if isinstance(wanted, End):
                facts.append(_fact(RUN, at, RunEnded(state=wanted.state, exit_reason=wanted.exit_reason)))
                run.outcome = RunOutcome(
                    state=wanted.state,
                    exit_reason=wanted.exit_reason,
                    started_at=0.0,
                    completed_at=at,
                    completed=list(run.outputs.items()),
                    failures=failures,
                    unfinished=unfinished,
                    units=wanted.units,
                    unit_failures=wanted.unit_failures,
                )
            if not isinstance(wanted, Start):
                continue
            instance, what = wanted.instance, does(wanted.instance)
            made = output(instance, at=at)
            trace = None if made.trace is None else made.trace.replace(metadata={"instance": instance})
            made = made.model_copy(update={"trace": trace})
            at += 1.0
            if what == "fail":
                error = AgentExecutionError("the model failed")
                failures.append(
                    FailedTask(
                        instance=instance,
                        at=at,
                        failure=TaskFailure(error=error, trace=trace),
                        completed_before=len(run.outputs),
                    )
                )
                failed = FailureRecorded(
                    error_type=type(error).__name__, message=str(error), trace=trace, error=error_data(error)
                )
                facts.append(_fact(instance, at, failed))
                told.append(Failed(at=at, instance=instance, error_type=type(error).__name__, message=str(error)))
            elif what == "exit":
                told.append(Exited(at=at, instance=instance))
                unfinished.append((instance, TaskFailure(error=None, trace=trace)))
            else:
                run.outputs[instance] = made
                facts.append(_fact(instance, at, OutputRecorded(output=made)))
                told.append(Completed(at=at, instance=instance, duration_s=1.0, total_tokens=10, tool_call_count=1))
    return run


def _fact(name: str, at: float, data: object) -> Fact:
    return Fact(run="run-1", name=name, at=at, data=data)  # type: ignore[arg-type]  # data of any kind


def raws(found: EnsembleOutput) -> list[str]:
    """Return the texts of a run's outputs."""
    return [each.raw for each in found.task_outputs]
