"""The way to a record from other nodes of a cluster, for contract tests: a line to the actor that writes there."""

from ensemble_ray.ports import Journal
from ensemble_ray.record.stores import StoreAddress


def line_to(address: StoreAddress, run_id: str, writer: str) -> Journal:
    """A journal whose facts go to the journal actor of this test's cluster."""
    import ray  # only tests that ask for the cluster pay for it

    from ensemble_ray.actors.link.journal import RemoteJournal
    from ensemble_ray.actors.shared.journal import JournalActor
    from ensemble_ray.actors.spawn import journal_actor

    node_id = str(ray.get_runtime_context().get_node_id())
    return RemoteJournal(journal_actor(JournalActor, node_id), address, run_id, writer=writer)
