"""What the nodes of a cluster say of themselves, and what is wrong with it. Package: values. Pure.

In: a question about a run, and what each node answered. Out: findings per node, each with what to do about it. Rules: the
process that asks is the measure; any difference to it counts, since what is pickled here is loaded there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["EndpointQuestion", "NodeQuestion", "NodeReport", "NodesReport"]

_INSTALL = "Install the same version on all nodes, or ship it: ensemble-ray submit --pip"
_SHIP = "Ship it: ensemble-ray submit --working-dir DIRECTORY, or install it on that node"
_REACH = "Check the network and the environment of that node: the agents that live there call the endpoint"
_ANSWER = "Look at the node: ray list nodes; or take it out of the cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointQuestion:
    """A model's endpoint that a node shall reach."""

    #: base URL without a user; empty: what the node's own `OPENAI_BASE_URL` says
    url: str
    #: whether the model brings its key, so that the node needs none
    has_key: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeQuestion:
    """What a run needs on each node."""

    #: names of distributions whose versions count
    packages: Sequence[str] = ()
    #: pickles that name modules of the user's, by what the user calls them: `Agent 'Writer'`
    payloads: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)
    endpoints: Sequence[EndpointQuestion] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What one node says of itself."""

    #: address of the node, as Ray has it
    address: str
    #: Ray's id of it; tells nodes of one address apart
    node_id: str = ""
    python: str = ""
    #: versions by distribution; empty: it is not installed
    packages: Mapping[str, str] = field(default_factory=dict[str, str])
    #: why pickles cannot be loaded, by what the user calls them
    unloadable: Mapping[str, str] = field(default_factory=dict[str, str])
    #: why endpoints cannot be used, by shown URL; empty: they can be
    endpoints: Mapping[str, str] = field(default_factory=dict[str, str])
    #: why it could not be asked; empty: it was
    refusal: str = ""
    duration_s: float = 0.0

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON data."""
        return {
            "address": self.address,
            "node_id": self.node_id,
            "python": self.python,
            "packages": dict(self.packages),
            "unloadable": dict(self.unloadable),
            "endpoints": dict(self.endpoints),
            "refusal": self.refusal,
            "duration_s": round(self.duration_s, 3),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesReport:
    """What all nodes say, beside the process that asks."""

    #: of the process that asks
    here: NodeReport
    nodes: Sequence[NodeReport]
    #: how long it took to ask all of them
    duration_s: float = 0.0

    @property
    def is_fine(self) -> bool:
        """Whether a run can be begun."""
        return all(not self.problems(node) for node in self.nodes)

    def problems(self, node: NodeReport) -> Sequence[tuple[str, str]]:
        """Return what is wrong with a node, each with what to do about it."""
        if node.refusal:
            return ((node.refusal, _ANSWER),)
        return (*self._differences(node), *_failures(node))

    def _differences(self, node: NodeReport) -> Iterator[tuple[str, str]]:
        if node.python != self.here.python:
            yield f"Python {node.python}, here {self.here.python}", "Use the same Python on all nodes"
        for name, version in self.here.packages.items():
            there = node.packages.get(name, "")
            if there == version:
                continue
            shown = f"{name} {there}" if there else f"{name} is missing"
            yield f"{shown}, here {version or 'missing'}", _INSTALL


def _failures(node: NodeReport) -> Iterator[tuple[str, str]]:
    for name, reason in node.unloadable.items():
        yield f"{name} cannot be loaded: {reason}", _SHIP
    for url, reason in node.endpoints.items():
        if reason:
            yield f"{url}: {reason}", _REACH
