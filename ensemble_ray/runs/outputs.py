"""OutputStore: outputs of a run's tasks by instance, until nobody needs them.

In: outputs as their run holds them: objects, or bytes in a process that runs no user code. Out: one of them, for a task
that gets it as context; all of them, for the end. Bytes lie in a file without a name, so that a run of large outputs does
not grow the process that schedules it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar, overload

from ensemble_ray.items.spool import Spool

Output = TypeVar("Output")
#: What a run's outputs take in memory before they lie in a file: little, since ended runs wait for their drivers.
_MEMORY_BYTES = 64 * 1024


class OutputStore(Protocol[Output]):
    """Outputs by instance."""

    def __contains__(self, instance: str) -> bool:
        """Return whether it has that output."""
        ...

    def put(self, instance: str, output: Output) -> None:
        """Keep an output."""
        ...

    def get(self, instance: str) -> Output:
        """Return an output.

        Raises:
            KeyError: it has none of that instance.
        """
        ...

    def keep_recorded(self, instance: str, body: bytes) -> None:
        """Keep a recorded output as bytes; it is one of the run's only when it is looked up. The newest one counts."""
        ...

    def lookup_recorded(self, instance: str) -> bool:
        """Make a recorded output one of the run's; return whether there is one."""
        ...

    def forget(self, instances: Sequence[str]) -> None:
        """Let outputs go; those that it has not are none."""
        ...


def recall_output(outputs: OutputStore[Output], instance: str) -> Output:
    """Take up a recorded output, and return it.

    Raises:
        KeyError: there is none.
    """
    outputs.lookup_recorded(instance)
    return outputs.get(instance)


class HeldOutputs(Generic[Output]):
    """Outputs in memory: of a run in the process of its caller, who gets these objects in the end.

    Recorded ones become objects when they are asked for.
    """

    def __init__(self, load: Callable[[str, bytes], Output] | None = None) -> None:
        """Make a store without outputs.

        Args:
            load: Makes an output of its instance and its recorded bytes; None: none is ever kept here.
        """
        self._outputs: dict[str, Output] = {}
        self._load = load
        self._recorded = SpooledOutputs()

    def __contains__(self, instance: str) -> bool:
        return instance in self._outputs or instance in self._recorded

    def put(self, instance: str, output: Output) -> None:
        """Keep an output."""
        self._outputs[instance] = output

    def get(self, instance: str) -> Output:
        """Return an output."""
        if instance not in self._outputs and self._load is not None:
            self._outputs[instance] = self._load(instance, self._recorded.get(instance))
        return self._outputs[instance]

    def keep_recorded(self, instance: str, body: bytes) -> None:
        """Keep a recorded output until it is looked up."""
        self._recorded.keep_recorded(instance, body)

    def lookup_recorded(self, instance: str) -> bool:
        """Make a recorded output one of the run's; return whether there is one."""
        return self._recorded.lookup_recorded(instance)

    def forget(self, instances: Sequence[str]) -> None:
        """Let outputs go."""
        self._recorded.forget(instances)
        for instance in instances:
            self._outputs.pop(instance, None)


class SpooledOutputs:
    """Outputs as bytes in a temporary file, which has no name and goes with the process."""

    def __init__(self) -> None:
        self._spool = Spool(memory_bytes=_MEMORY_BYTES)
        self._slots: dict[str, int] = {}
        #: of recorded outputs that were not looked up
        self._recorded: dict[str, int] = {}

    def __contains__(self, instance: str) -> bool:
        return instance in self._slots

    def put(self, instance: str, output: bytes) -> None:
        """Keep an output.

        Raises:
            RecordError: the file cannot be written.
        """
        self._slots[instance] = self._spool.put(output)

    def get(self, instance: str) -> bytes:
        """Return an output."""
        return self._spool.get(self._slots[instance])

    def keep_recorded(self, instance: str, body: bytes) -> None:
        """Keep a recorded output until it is looked up.

        Raises:
            RecordError: the file cannot be written.
        """
        self._recorded[instance] = self._spool.put(body)

    def lookup_recorded(self, instance: str) -> bool:
        """Make a recorded output one of the run's; return whether there is one."""
        slot = self._recorded.pop(instance, None)
        if slot is not None:
            self._slots[instance] = slot
        return slot is not None

    def forget(self, instances: Sequence[str]) -> None:
        """Let outputs go; what the file has of them stays until the run ends."""
        for instance in instances:
            self._slots.pop(instance, None)


class ListedOutputs(Sequence[tuple[str, Output]]):
    """Outputs with their instances, in order; each is read when it is asked for."""

    def __init__(self, store: OutputStore[Output], instances: Sequence[str]) -> None:
        self._store = store
        self._instances = tuple(instances)

    def __len__(self) -> int:
        return len(self._instances)

    @overload
    def __getitem__(self, index: int) -> tuple[str, Output]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[str, Output]]: ...

    def __getitem__(self, index: int | slice) -> tuple[str, Output] | Sequence[tuple[str, Output]]:
        if isinstance(index, slice):
            return ListedOutputs(self._store, self._instances[index])
        instance = self._instances[index]
        return instance, self._store.get(instance)

    def __iter__(self) -> Iterator[tuple[str, Output]]:
        for instance in self._instances:
            yield instance, self._store.get(instance)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(self._instances)
