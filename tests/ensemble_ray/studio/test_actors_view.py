"""Processes of clusters, and owners of runs, as the page shows them."""

from __future__ import annotations

from dataclasses import replace

from ensemble_ray.studio.schemas import Actors, ProcessInfo, ProcessTask
from ensemble_ray.studio.views.actors_view import ActorsQuestion, RunAndOwner, actors_of
from ensemble_ray.values.metrics import (
    ActorDescription,
    BucketDescription,
    ClusterDescription,
    EndpointDescription,
    NodeDescription,
    ProcessDescription,
    RunDescription,
    TaskDescription,
)

NOW = 1000.0


def process(name: str, *runs: str, **more: object) -> ProcessDescription:
    """A process on node `n1`, with an agent of each of these runs and a task of each that began at 990."""
    return ProcessDescription(
        name=name,
        kind="agent",
        node_id="n1",
        host="alpha",
        pid=len(name),
        memory_bytes=2**21,
        runs=tuple(RunDescription(run_id=run, agents=("Ann",), lost=run == "worn") for run in runs),
        tasks=tuple(TaskDescription(run_id=run, instance="t#0", began_at=990.0) for run in runs),
        **more,  # type: ignore[arg-type]
    )


def cluster(*processes: ProcessDescription, **more: object) -> ClusterDescription:
    """A cluster of two nodes, of which one has everything."""
    head = ProcessDescription(
        name="scheduler", kind="scheduler", node_id="n1", host="alpha", pid=4, queue=1, restarts=2
    )
    limiter = ProcessDescription(name="rate_limiter", kind="limiter", node_id="n1", host="alpha", pid=5)
    buckets = (
        BucketDescription(name="calm", requests=5, period_s=1.0, tokens=5, waiting=0),
        BucketDescription(name="busy", requests=1, period_s=60.0, tokens=0, waiting=3, holders=("gone", "one")),
    )
    return ClusterDescription(
        address="alpha:6379",
        nodes=(
            NodeDescription(node_id="n1", name="alpha", address="10.0.0.1"),
            NodeDescription(node_id="n2", name="b"),
        ),
        actors=(
            ActorDescription(process=head, processes=processes, more_processes=int(str(more.get("left_out", 0)))),
            ActorDescription(process=limiter, buckets=buckets),
        ),
    )


def asked(*visible: str, run_id: str | None = None, is_all_seen: bool = True) -> ActorsQuestion:
    """Who asks for what."""
    return ActorsQuestion(visible=frozenset(visible), is_all_seen=is_all_seen, run_id=run_id, at=NOW)


def owner(run_id: str, *, pid: int = 77, host: str = "alpha") -> RunAndOwner:
    """A run that some process owns, with a step that runs."""
    return RunAndOwner(
        run_id=run_id,
        host=host,
        pid=pid,
        name=f"process {pid}",
        running=[ProcessTask(run_id=run_id, step="t#0")],
    )


def everyone(told: Actors) -> dict[str, ProcessInfo]:
    """All processes by name."""
    return {each.name: each for node in told.nodes for each in node.processes}


def test_processes_are_shown_on_their_nodes() -> None:
    """S-STU-32: where they are, what they have and do, how often another died in their place."""
    starting = ProcessDescription(name="new", kind="agent", state="starting", reserved="num_gpus=1", queue=4)
    told = actors_of([cluster(process("one", "a", "worn"), starting)], [], asked("a"))
    assert [(node.node, node.address, len(node.processes)) for node in told.nodes] == [
        ("alpha", "10.0.0.1", 3),
        ("no node yet", None, 1),
    ]
    one, new = everyone(told)["one"], everyone(told)["new"]
    assert [(run.run_id, run.known, run.agents) for run in one.runs] == [("a", True, ["Ann"]), ("worn", False, ["Ann"])]
    assert (one.restarts, one.memory_mb, one.scheduler, one.in_flight[0].since) == (1, 2.0, "scheduler", 990_000)
    assert (new.state, new.reserved, new.queue, new.pid) == ("starting", "num_gpus=1", 4, None)
    assert everyone(told)["scheduler"].restarts == 2
    assert (told.clusters, told.note) == (["alpha:6379"], None)


def test_limits_are_shown_with_the_longest_queue_first() -> None:
    """S-STU-33: how many wait, what is there, and who lives where it was asked for."""
    told = actors_of([cluster(process("one", "a"), left_out=7)], [], asked("a"))
    assert [(each.name, each.queue, each.permits) for each in told.limiters] == [("busy", 3, 0), ("calm", 0, 5)]
    assert [each.agents for each in told.limiters] == [["Ann"], []]
    assert told.note == "7 more processes have less to do and are not shown."


def test_an_endpoint_is_shown_once_as_it_is_worst() -> None:
    """S-STU-33: in how many processes its breaker is not closed, when it is tried again, and what waits in all of them."""
    calm = EndpointDescription(name="e", state="closed", sent=2, limit=3)
    bad = EndpointDescription(name="e", state="open", probe_in_s=4.0, last_failure="HTTP 503", waiting=2, limit=1)
    better = EndpointDescription(name="e", state="half_open", sent=1)
    other = EndpointDescription(name="d", state="closed")
    told = actors_of(
        [
            cluster(
                process("one", "a", endpoints=(calm, other)),
                process("two", "a", endpoints=(bad,)),
                process("three", "a", endpoints=(better,)),
            )
        ],
        [],
        asked("a"),
    )
    worst, last = told.breakers
    assert (worst.name, worst.state, worst.processes, worst.open_in) == ("e", "open", 3, 2)
    assert (worst.probe_at, worst.last_failure, worst.sent, worst.queue, worst.limit) == (
        1_004_000,
        "HTTP 503",
        3,
        2,
        4,
    )
    assert (last.name, last.state, last.limit) == ("d", "closed", None)


def test_owners_are_shown_once_beside_what_the_cluster_says() -> None:
    """S-STU-32: a scheduler is no second process; one that drives runs is one row for all of them, and its tasks are elsewhere."""
    owned = [owner("a", pid=4), owner("b"), owner("inline"), owner("far", host="beta")]
    told = actors_of([cluster(process("one", "a", "b"))], owned, asked("a", "b", "inline", "far"))
    found = everyone(told)
    assert found["scheduler"].queue == 1
    assert "process 4" not in found
    assert [node.node for node in told.nodes] == ["alpha", "beta"]
    of_one = actors_of([cluster(process("one", "a", "b"))], [owner("a", pid=4)], asked("a", run_id="a"))
    assert everyone(of_one)["scheduler"].queue == 0
    driver = told.nodes[0].processes[0]
    assert (driver.kind, [run.run_id for run in driver.runs]) == ("driver", ["b", "inline"])
    assert [task.run_id for task in driver.in_flight] == ["inline"]


def test_of_a_run_only_what_works_for_it_is_shown() -> None:
    """S-STU-32: its scheduler, its processes, and of these its tasks; the limiter may hold it up."""
    told = actors_of([cluster(process("one", "a", "b"), process("two", "b"))], [], asked("a", "b", run_id="a"))
    assert set(everyone(told)) == {"scheduler", "one", "rate_limiter"}
    assert [task.run_id for task in everyone(told)["one"].in_flight] == ["a"]
    assert not actors_of([cluster(process("two", "b"))], [], asked("b", run_id="a")).breakers


def test_a_visitor_sees_nothing_of_others() -> None:
    """S-STU-36: runs, limits and endpoints that are not theirs; of a shared process their own part."""
    bad = EndpointDescription(name="secret", state="open", last_failure="secret")
    told = actors_of(
        [
            cluster(
                process("one", "a", "secret", more_tasks=9, endpoints=(bad,)), process("secret", "secret"), left_out=3
            )
        ],
        [owner("a", pid=4)],
        asked("a", is_all_seen=False),
    )
    assert everyone(told)["scheduler"].queue == 0
    assert "secret" not in told.model_dump_json()
    one = everyone(told)["one"]
    assert (len(one.in_flight), one.more_in_flight, one.queue) == (1, 0, 0)
    assert (told.limiters, told.breakers, told.clusters, told.note) == ([], [], [], None)
    silent = replace(cluster(process("one", "a")), notes=("secret does not answer", "secret neither"))
    assert actors_of([silent], [], asked("a")).note == "secret does not answer secret neither"
    note = actors_of([silent], [], asked("a", is_all_seen=False)).note
    assert note == "Not all of the cluster answered: more processes may work for these runs."
