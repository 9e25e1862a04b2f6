"""Outputs of a run's tasks by instance; bytes are in a file, so that a scheduler does not grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, overload

from ensemble_ray.execute.orders import OutputOf
from ensemble_ray.items.line_file import Spool

Output = TypeVar("Output")
_MEMORY_BYTES = 64 * 1024  # ended runs wait for their drivers, so few bytes stay in memory


class ReadableOutputs(Protocol):
    def __contains__(self, instance: str) -> bool: ...

    def get(self, instance: str) -> Any:
        """A KeyError: the instance has no output."""
        ...


class OutputStore(ReadableOutputs, Protocol):
    """Outputs as objects, or as bytes."""

    def put(self, instance: str, output: Any) -> None: ...

    def stage(self, instance: str, body: bytes) -> None:
        """Store a recorded output, which joins the run after a look-up. The newest counts."""

    def lookup_recorded(self, instance: str) -> bool:
        """Add a recorded output to the run; return whether there is one."""
        ...


def recall_output(outputs: OutputStore, instance: str) -> Any:
    """Look up a recorded output. A KeyError: there is none."""
    outputs.lookup_recorded(instance)
    return outputs.get(instance)


class InMemoryOutputs(Generic[Output]):
    """Outputs of a run in its caller's process; recorded ones become objects when read."""

    def __init__(self, load: Callable[[str, bytes], Output] | None = None) -> None:
        """`load` creates an output from its instance and its recorded bytes; None: no recorded outputs."""
        self._outputs: dict[str, Output] = {}
        self._load = load
        self._recorded = SpooledOutputs()
        self.stage, self.lookup_recorded = self._recorded.stage, self._recorded.lookup_recorded

    def __contains__(self, instance: str) -> bool:
        return instance in self._outputs or instance in self._recorded

    def put(self, instance: str, output: Output) -> None:
        self._outputs[instance] = output

    def get(self, instance: str) -> Output:
        if instance not in self._outputs and self._load is not None:
            self._outputs[instance] = self._load(instance, self._recorded.get(instance))
        return self._outputs[instance]


class SpooledOutputs:
    """Bytes in an unnamed temporary file, which the system deletes with the process."""

    def __init__(self) -> None:
        self._spool = Spool(memory_bytes=_MEMORY_BYTES)
        self._slots: dict[str, int] = {}
        self._recorded: dict[str, int] = {}  # before their look-up

    def __contains__(self, instance: str) -> bool:
        return instance in self._slots

    def put(self, instance: str, output: bytes) -> None:
        self._slots[instance] = self._spool.put(output)

    def get(self, instance: str) -> bytes:
        return self._spool.get(self._slots[instance])

    def stage(self, instance: str, body: bytes) -> None:
        self._recorded[instance] = self._spool.put(body)

    def lookup_recorded(self, instance: str) -> bool:
        slot = self._recorded.pop(instance, None)
        if slot is not None:
            self._slots[instance] = slot
        return slot is not None


class OutputsToCome:
    """Outputs of a run, and an `OutputOf` for each task still to complete."""

    def __init__(self, outputs: ReadableOutputs, coming: set[str]) -> None:
        self._outputs = outputs
        self.coming = coming

    def __contains__(self, instance: str) -> bool:
        return instance in self.coming or instance in self._outputs

    def get(self, instance: str) -> Any:
        return OutputOf(instance) if instance in self.coming else self._outputs.get(instance)


class ListedOutputs(Sequence[tuple[str, Any]]):
    """Outputs with their instances; each is loaded on access."""

    def __init__(self, store: OutputStore, instances: Sequence[str]) -> None:
        self._store = store
        self._instances = tuple(instances)

    def __len__(self) -> int:
        return len(self._instances)

    @overload
    def __getitem__(self, index: int) -> tuple[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> tuple[str, Any] | Sequence[tuple[str, Any]]:
        if isinstance(index, slice):
            return ListedOutputs(self._store, self._instances[index])
        instance = self._instances[index]
        return instance, self._store.get(instance)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for instance in self._instances:
            yield instance, self._store.get(instance)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(self._instances)
