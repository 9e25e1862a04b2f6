"""Tools, models and Datasets that an operator serves. Clients cannot call other tools of the teams."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from ensemble_ray import ChatModel, ExitEarlyError, IllegalStateError, ValidationError
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.serve.schemas import Refusal, ToolInfo, ToolReply
from ensemble_ray.teamfile.fields import load_model
from ensemble_ray.teamfile.references import find_attribute, make_importable
from ensemble_ray.tools.call import call_tool
from ensemble_ray.tools.registry import BoundAgentTool, resolve_tools
from ensemble_ray.tools.tool import ToolContext
from ensemble_ray.values.ids import new_object_id
from ensemble_ray.values.value import to_tuple

_log = bounded_logger(__name__)
_CALL_S = 30.0
#: A call that timed out may still occupy a thread.
_MOST_CALLS = 10
_RETRY_S = 5


class ToolCatalog:
    def __init__(self, entries: object = (), *, time_limit_s: float = _CALL_S) -> None:
        tools = to_tuple(entries)
        self._tools = resolve_tools(tools)
        bound = [self._tools.get(name) for name in self._tools.names]
        asking = [each.name for each in bound if isinstance(each, BoundAgentTool) and each.asks_first]
        if asking:
            raise ValidationError(f"Tools that ask a person before each call cannot be offered over HTTP: {asking}")
        #: by tool name; an entry may contain several tools
        self.entries: Mapping[str, object] = {name: each for each in tools for name in resolve_tools([each]).names}
        self._time_limit_s = time_limit_s
        self._running = 0

    @property
    def infos(self) -> list[ToolInfo]:
        return [
            ToolInfo(name=each.name, description=each.description, parameters=cast("JsonValue", each.parameters))
            for each in self._tools.specs
        ]

    async def invoke(self, name: str, arguments: Mapping[str, JsonValue]) -> ToolReply:
        bound = self._tools.get(name)
        if bound is None:
            shown = ", ".join(self._tools.names)
            text = f"There is no tool '{name[:200]}'. There are: [{shown}]"
            raise Refusal(HTTPStatus.BAD_REQUEST, "TOOL_NOT_FOUND", text)
        if self._running >= _MOST_CALLS:
            text = f"{self._running} tool calls are running: try again later"
            raise Refusal(HTTPStatus.TOO_MANY_REQUESTS, "QUEUE_FULL", text, retry_after_s=_RETRY_S)
        context = ToolContext(tool_name=name, agent_role="endpoint", idempotency_key=new_object_id())
        started_s = time.perf_counter()
        self._running += 1
        try:
            async with asyncio.timeout(self._time_limit_s):
                outcome = await call_tool(bound, json.dumps(arguments), context=context)
        except TimeoutError:
            text = f"The tool '{name}' did not answer within {self._time_limit_s:g} s"
            raise Refusal(HTTPStatus.GATEWAY_TIMEOUT, "TOOL_TIMEOUT", text) from None
        except ExitEarlyError as error:
            text = f"The tool '{name}' ends the calling run, and this call has none: {error}"
            raise Refusal(HTTPStatus.BAD_REQUEST, "TOOL_ENDS_RUN", text) from error
        except IllegalStateError as error:
            _log.error("Tool '%s' is misconfigured: %s", name, error)
            text = f"The tool '{name}' is misconfigured. See the log of the endpoint"
            raise Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "TOOL_CONFIGURATION_ERROR", text) from error
        finally:
            self._running -= 1
        return ToolReply(
            name=name, outcome=outcome.outcome, output=outcome.text, duration_s=time.perf_counter() - started_s
        )


def load_catalog(references: Sequence[str]) -> ToolCatalog:
    """Return the tools of these references. Each names a tool or a list of tools."""
    entries: list[object] = []
    if references:
        make_importable(Path.cwd())
    for reference in references:
        found = find_attribute(reference)
        entries += cast("Sequence[object]", found) if isinstance(found, list | tuple) else [found]
    return ToolCatalog(entries)


def load_models(references: Mapping[str, object], *, needs_keys: bool = True) -> Mapping[str, ChatModel]:
    """Return models by name. The process that deploys does not need their keys."""
    found: dict[str, ChatModel] = {}
    for name, given in references.items():
        try:
            found[name] = load_model(given, needs_keys=needs_keys)
        except ValidationError as error:
            raise ValidationError(f"Model '{name}': {error}") from error
    return found


def named_models(given: Iterable[str]) -> dict[str, str]:
    """Parse texts of the form `NAME=MODEL`, or `module:attribute` with the attribute as the name."""
    found: dict[str, str] = {}
    for text in filter(None, map(str.strip, given)):
        name, equals, reference = (part.strip() for part in text.partition("="))
        if not equals:
            name, reference = text.rpartition(":")[2], text
        if not name or not reference:
            raise ValidationError(f"'{text}' is not a model with a name: write NAME=MODEL")
        if name in found:
            raise ValidationError(f"Two models are called '{name}': {found[name]} and {reference}. Rename one of them")
        found[name] = reference
    return found


class DatasetCatalog:
    """The Datasets of an endpoint, or functions that return them. `references` name them in messages."""

    def __init__(
        self, sources: Mapping[str, object] | None = None, references: Mapping[str, str] | None = None
    ) -> None:
        self._sources = dict(sources or {})
        self._references = dict(references or {})

    def check(self, name: str) -> None:
        if name not in self._sources:
            known = ", ".join(sorted(self._sources))
            text = f"There is no Dataset '{name[:200]}'. There are: [{known}]"
            raise Refusal(HTTPStatus.BAD_REQUEST, "ITEMS_DATASET_NOT_FOUND", text)

    def open(self, name: str) -> object:
        """Return a Dataset with rows in a fixed order, which a resumed run reads again. Blocks."""
        self.check(name)
        source = self._sources[name]
        found = source if _is_dataset(source) else cast("Callable[[], object]", source)()
        if not _is_dataset(found):
            text = (
                f"The Dataset '{name}' ({self._references.get(name, name)}) is of type {type(found).__name__}: return a "
                "ray.data.Dataset"
            )
            raise Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "INTERNAL_ERROR", text)
        options = getattr(getattr(found, "context", None), "execution_options", None)
        if options is not None:
            options.preserve_order = True
        return found


def parse_datasets(texts: str) -> dict[str, str]:
    """Parse a text such as `orders=shop:orders,people=shop:people`.
    Example:
        >>> parse_datasets("orders=shop:orders, people=shop:read_people")
        {'orders': 'shop:orders', 'people': 'shop:read_people'}
    """
    found: dict[str, str] = {}
    for text in (each.strip() for each in texts.split(",")):
        name, equals, reference = text.partition("=")
        if text and not (name.strip() and equals and reference.strip()):
            raise ValidationError(f"A Dataset is NAME=module:attribute, got: '{text}'")
        if text:
            found[name.strip()] = reference.strip()
    return found


def load_datasets(references: Mapping[str, str]) -> DatasetCatalog:
    if references:
        make_importable(Path.cwd())
    sources = {name: find_attribute(reference) for name, reference in references.items()}
    for name, source in sources.items():
        if not _is_dataset(source) and not callable(source):
            raise ValidationError(
                f"The Dataset '{name}' ({references[name]}) is of type {type(source).__name__}: name a ray.data.Dataset, or a "
                "function without arguments that returns one"
            )
    return DatasetCatalog(sources, references)


def _is_dataset(value: object) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "iter_rows", None))
