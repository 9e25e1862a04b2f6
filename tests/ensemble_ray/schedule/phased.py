"""Runs of phases as obedient coordinators would make them: checked after every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ensemble_ray import Plan
from ensemble_ray.plan.plan import LoopUnit, PhaseUnit
from ensemble_ray.schedule.instructions import Instruction, PhaseResult, ReflectOn, Start, Warn
from ensemble_ray.schedule.nested import make_machine
from ensemble_ray.schedule.phases import PhasesMachine
from ensemble_ray.schedule.stimuli import Completed, Stimulus
from ensemble_ray.schedule.unit import Execution, UnitMachine
from tests.ensemble_ray.schedule.invariants import check
from tests.ensemble_ray.schedule.nesting import Nest, node


def phase(name: str, *members: str, after: Sequence[str] = (), **fields: object) -> PhaseUnit:
    """A phase; its one task has its name in small letters where none is named."""
    keys = tuple(f"phase:{each}" for each in after)
    return PhaseUnit(key=f"phase:{name}", name=name, members=members or (name.lower(),), after=keys, **fields)  # type: ignore[arg-type]  # fields of a phase


def reviewed(name: str, *members: str, after: Sequence[str] = (), **fields: object) -> PhaseUnit:
    """A phase whose review is called `check-` and its name."""
    return phase(name, *members, after=after, review=f"check-{name}", **fields)


class Phased(Nest):
    """A run of phases and of loops in them."""

    def __init__(
        self,
        *units: PhaseUnit | LoopUnit,
        context: Mapping[str, Sequence[str]] | None = None,
        error_strategy: str = "fail_fast",
    ) -> None:
        keys = {unit.key for unit in units}
        tasks: dict[str, None] = {}
        for unit in units:
            inside = unit.body if isinstance(unit, LoopUnit) else (*unit.members, unit.review or "")
            tasks.update((key, None) for key in inside if key and key not in keys)
        nodes = tuple(node(key, (context or {}).get(key, ())) for key in tasks)
        plan = Plan(workflow="sequential", nodes=nodes, units=units, error_strategy=error_strategy)
        super().__init__(plan=plan, make=self._make)

    def _make(self, execution: Execution) -> UnitMachine:
        machine = make_machine(execution)
        if isinstance(machine, PhasesMachine):
            self.phases = machine
        return machine

    def handle(self, *stimuli: Stimulus) -> list[Instruction]:
        """Tell the source."""
        done = super().handle(*stimuli)
        check(self.phases)
        return done

    def review(self, instance: str, text: str | None) -> list[Instruction]:
        """Let a review give this answer."""
        self.at += 1
        return self.handle(Completed(at=self.at, instance=instance, text=text))

    def reflected(self, name: str, execution: int) -> list[Instruction]:
        """Say that an attempt of a phase is reflected on."""
        return self.answer(ReflectOn(unit=f"phase:{name}", execution=execution), answer=True)

    @property
    def warnings(self) -> list[str]:
        """Return what was warned of."""
        return [each.text for each in self.all(Warn)]

    @property
    def results(self) -> dict[str, PhaseResult]:
        """Return what became of the phases, by name, in the order in which they were settled."""
        return {each.unit.removeprefix("phase:"): each for each in self.end.units if isinstance(each, PhaseResult)}

    @property
    def statuses(self) -> dict[str, str]:
        """Return the status of each phase."""
        return {name: result.status for name, result in self.results.items()}


def instances(wanted: Sequence[Instruction]) -> list[str]:
    """What is to be started."""
    return [each.instance for each in wanted if isinstance(each, Start)]


def shown(wanted: Sequence[Instruction]) -> list[list[str]]:
    """The context of what is to be started."""
    return [
        [name for part in each.context or () for name in part.instances] for each in wanted if isinstance(each, Start)
    ]
