"""What the loop of an item puts on record before it goes on."""

from __future__ import annotations

from ensemble_ray import Loop, Task
from ensemble_ray.ports import Persistence
from tests.ensemble_ray.coordinator.map_reduce.running import WORKER, Conducting, team, until
from tests.ensemble_ray.execute.running import WatchedJournal


async def test_verdict_of_an_item_is_committed_before_the_next_iteration() -> None:
    """S-DUR-122: other processes commit what follows from it, so that it must not be lost alone."""

    def refining(item: object) -> Loop:
        task = Task(name="write", description=f"write {item}", expected_output="a line", agent=WORKER)
        return Loop(name="refine", body=[task], until=lambda context: context.iteration_number > 1)

    journal = WatchedJournal()
    run = Conducting(team(1, map_task=refining), count=1, journal=journal)
    await until(lambda: len(run.executor.started) == 1)
    run.coordinator.deliver([run.completion(run.executor.started[0])])
    await until(lambda: len(run.executor.started) == 2)
    run.coordinator.deliver([run.completion(run.executor.started[1])])
    await until(lambda: len(journal.degrees_of("stimulus")) > 1)
    assert journal.degrees_of("stimulus") == [("stimulus", Persistence.COMMITTED)] * 2
    await run.play()
