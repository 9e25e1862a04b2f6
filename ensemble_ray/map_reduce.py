"""`MapReduceEnsemble` and `MapEnsemble`: ensembles over many items."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence, Sized
from contextlib import aclosing
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Unpack, cast

from pydantic import PrivateAttr

from ensemble_ray.definition.ensemble import Levels
from ensemble_ray.definition.fields import Workflow
from ensemble_ray.definition.map_reduce import MapDefinition, MapReduceDefinition, warn_of_old_order
from ensemble_ray.definition.run_options import merge_options
from ensemble_ray.definition.run_rules import RunListeners
from ensemble_ray.definition.task import Task, WithReflection
from ensemble_ray.ensemble import Ensemble, Startable, stream_run
from ensemble_ray.errors import ValidationError
from ensemble_ray.plan.map_reduce_factories import StaticTree, static_tree

if TYPE_CHECKING:
    from ensemble_ray.definition.run_options import RunFields, RunOptions
    from ensemble_ray.events import Event
    from ensemble_ray.ports import ChatModel
    from ensemble_ray.runs.handle import Run
    from ensemble_ray.runs.map_reduce.launcher import MapReduceRun
    from ensemble_ray.runs.ports import Runtime
    from ensemble_ray.values.outputs import EnsembleOutput, ItemResult


class MapReduceEnsemble(MapReduceDefinition, Startable["Run | MapReduceRun"]):
    """A task for each of many items, and tasks that combine their outputs, until there is one output.

    It needs `items`, `map_task`, which makes the task of an item, and `reduce_task`, which makes the task over a group of
    outputs and has that group as its `context`. Groups have `chunk_size` outputs, or as many as fit
    `target_token_budget`. `mode="pipelined"` begins a reduce as soon as its group is full. `on_item_error`,
    `dead_letters` and `results` control how single items are handled. All other arguments are arguments of `Ensemble`.

    Over a list, in groups of a fixed size, construction makes all tasks, and the run is the run of an ordinary parallel
    ensemble (`to_ensemble`). With a budget of tokens, over another source, pipelined, or with one of the three arguments for
    items, tasks are made during the run: `start()` then returns a handle with `items()`.

    Examples:
        >>> from ensemble_ray.testing import ScriptedModel
        >>> summaries = MapReduceEnsemble(
        ...     items=["a long report", "another one", "a third"],
        ...     map_task=lambda report: Task.of(f"Summarise: {report}"),
        ...     reduce_task=lambda group: Task(description="Join", expected_output="One text", context=group),
        ...     llm=ScriptedModel(otherwise="done"),
        ...     chunk_size=2,
        ... )
        >>> [summaries.node_types[task] for task in summaries.to_ensemble().tasks]
        ['map', 'map', 'map', 'reduce', 'reduce', 'final-reduce']
        >>> summaries.run(runtime="inline").raw
        'done'
    """

    _tree: StaticTree | None = PrivateAttr(default=None)

    if not TYPE_CHECKING:  # type checkers make the signature from the fields

        def __init__(self, *args: object, **data: object) -> None:
            super().__init__(*args, **data)
            # A validator would wrap errors of factories (S-MR-106).
            warn_of_old_order(data)
            self._tree = static_tree(self) if self.is_planned else None

    @classmethod
    def of(
        cls,
        model: ChatModel | str | Sequence[ChatModel | str] | None,
        items: Iterable[Any] | None,
        map_description: str | None,
        reduce_description: str | None,
        *,
        runtime: Runtime | str | None = None,
        **fields: Unpack[RunFields],
    ) -> EnsembleOutput:
        """Map and reduce in one call: each item's task is `{map_description}: {item}`, groups have 5 outputs.

        Args:
            model: The model of all tasks: an object, a string such as `"openai:gpt-4o-mini"`, or a list of these.
            items: As the field `items`.
            map_description: Task for an item.
            reduce_description: Task for a group; it receives the outputs of the group as its context.
            runtime: As in `run`.
            fields: As in `run`.

        Raises:
            ValidationError: an argument is missing; the message says which.
            EnsembleError: as `run`.
        """
        if model is None:
            raise ValidationError("model must not be None")
        if items is None:
            raise ValidationError("items must not be None")
        if isinstance(items, Sized) and not len(items):
            raise ValidationError("items must not be empty")
        for name, text in (("map_description", map_description), ("reduce_description", reduce_description)):
            if text is None or not text.strip():
                raise ValidationError(f"{name} must not be blank")

        def map_task(item: object) -> Task:
            return Task.of(f"{map_description}: {item}")

        def reduce_task(chunk: list[Task]) -> Task:
            return Task.of(cast("str", reduce_description)).replace(context=chunk)

        return cls(items=items, map_task=map_task, reduce_task=reduce_task, llm=model).run(runtime=runtime, **fields)

    @property
    def node_types(self) -> Mapping[Task, str]:
        """Node type by task: `map`, `reduce` or `final-reduce`; empty if tasks are made during the run."""
        return MappingProxyType({} if self._tree is None else self._tree.node_types)

    @property
    def map_reduce_levels(self) -> Mapping[Task, int]:
        """Level by task, from 0; empty if tasks are made during the run."""
        return MappingProxyType({} if self._tree is None else self._tree.levels)

    def to_ensemble(self) -> Ensemble:
        """Return the tree of tasks as a parallel ensemble, without running it.

        Raises:
            NotImplementedError: the tasks are made during the run.
        """
        tree = self._tree
        if tree is None:
            where = "in adaptive mode" if self.is_adaptive else "if tasks are made during a run"
            raise NotImplementedError(
                f"to_ensemble() is not supported {where}. What ran, level by level, is in the trace of a run: "
                "output.trace.task_traces and output.trace.map_reduce_levels"
            )
        rules = {
            info.alias or name: cast("object", getattr(self, name))
            for name, info in (RunListeners.model_fields | WithReflection.model_fields).items()
        }
        ensemble = Ensemble(**cast("dict[str, Any]", rules), tasks=tree.tasks, workflow=Workflow.PARALLEL)
        ensemble.share_reflections(self)
        places = {task.object_id: (tree.node_types[task], level) for task, level in tree.levels.items()}
        texts = {task.object_id: each for task, each in tree.texts.items()}
        return ensemble.with_levels(Levels(workflow=self.shown_workflow, places=places, texts=texts))

    async def stream(
        self,
        inputs: Mapping[str, object] | None = None,
        *,
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        **fields: Unpack[RunFields],
    ) -> AsyncIterator[Event | ItemResult | EnsembleOutput]:
        """Yield updates as they arrive, then the output as the last item. Leaving the loop early cancels the run.

        Updates are results of items. If construction makes all tasks, they are events, as in `Ensemble.stream`.
        """
        begun = self.begin(
            inputs,
            runtime=runtime,
            run_id=run_id,
            options=merge_options(options, fields),
            has_event_readers=self.is_planned,
        )
        updates: AsyncIterable[Event | ItemResult] = (
            begun.events() if self.is_planned else cast("MapReduceRun", begun).items()
        )
        async with aclosing(stream_run(begun, updates)) as stream:
            async for each in stream:
                yield each

    def _prepare(
        self, inputs: Mapping[str, object] | None, options: RunOptions | None, *, keeps_items: bool
    ) -> Callable[..., Run | MapReduceRun]:
        definition = self.with_options(options).with_dashboard_parts()
        if not self.is_planned:
            return _over_items(definition, inputs, keeps_items=keeps_items)
        from ensemble_ray.runs.handle import Run
        from ensemble_ray.runs.planned import PlannedLauncher

        ensemble = self.to_ensemble().with_options(options).with_dashboard_parts()
        return partial(Run, PlannedLauncher(ensemble, inputs), origin=self.source)


class MapEnsemble(MapDefinition, Startable["MapReduceRun"]):
    """A task for each of many items. Its output contains the outputs of all items, in the order of the items.

    It needs `items` and `map_task`, which makes the task of an item. `on_item_error`, `dead_letters` and `results` control
    how single items are handled. All other arguments are arguments of `Ensemble`. Tasks are made during the run, only as far
    ahead as there are free slots for them. `start().items()` and `stream()` yield results as they arrive.

    Examples:
        >>> from ensemble_ray.testing import ScriptedModel
        >>> words = MapEnsemble(
        ...     items=["tea", "milk"],
        ...     map_task=lambda word: Task.of(f"Translate: {word}"),
        ...     llm=ScriptedModel(otherwise="done"),
        ...     on_item_error="collect",
        ... )
        >>> words.item_policy
        'collect'
    """

    async def stream(
        self,
        inputs: Mapping[str, object] | None = None,
        *,
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        **fields: Unpack[RunFields],
    ) -> AsyncIterator[ItemResult | EnsembleOutput]:
        """Yield results of items as they arrive, then the output as the last item. Leaving the loop early cancels the run."""
        begun = self.begin(
            inputs, runtime=runtime, run_id=run_id, options=merge_options(options, fields), has_event_readers=False
        )
        async with aclosing(stream_run(begun, begun.items())) as stream:
            async for each in stream:
                yield each

    def _prepare(
        self, inputs: Mapping[str, object] | None, options: RunOptions | None, *, keeps_items: bool
    ) -> Callable[..., MapReduceRun]:
        return _over_items(self.with_options(options).with_dashboard_parts(), inputs, keeps_items=keeps_items)


def _over_items(
    definition: MapDefinition, inputs: Mapping[str, object] | None, *, keeps_items: bool
) -> Callable[..., MapReduceRun]:
    from ensemble_ray.runs.map_reduce.launcher import MapReduceLauncher, MapReduceRun  # needed only for these runs

    launcher = MapReduceLauncher(definition, inputs, keeps_items=keeps_items)
    return partial(MapReduceRun, launcher, origin=definition.source)
