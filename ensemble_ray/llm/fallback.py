"""Fallback chains: several models in one place, the failures after which the next one is asked, and rules of choice."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast, get_args

from ensemble_ray.errors import (
    AllModelsFailedError,
    CircuitOpenError,
    EnsembleError,
    ExitEarlyError,
    IllegalStateError,
    RateLimitTimeoutError,
    UnreadableAttachmentError,
    ValidationError,
    message_of,
)
from ensemble_ray.errors.bodies import CLIENT_ERROR, SERVER_ERROR
from ensemble_ray.errors.texts import brief
from ensemble_ray.errors.travel import is_provider_error, provider_answer_of, status_of
from ensemble_ray.llm.factory import resolve_llm
from ensemble_ray.llm.failures import fault_of
from ensemble_ray.llm.names import ModelNames, model_names
from ensemble_ray.ports import ChatModel, StreamingChatModel, StructuredChatModel
from ensemble_ray.process.concurrency import call_user
from ensemble_ray.values.attachments import AttachmentKind, kinds_read
from ensemble_ray.values.messages import ChatMessage, ChatResponse, JsonSchema, ToolSpec, incomplete_reason

T = TypeVar("T")

FallbackReason = Literal["quota", "refusal", "breaker", "failure", "context"]
REASONS: tuple[FallbackReason, ...] = get_args(FallbackReason)
#: Errors of the library that are failures of one model. Every other one is the run's.
_REASON_OF_CLASS: Mapping[type[EnsembleError], FallbackReason] = {
    CircuitOpenError: "breaker",
    RateLimitTimeoutError: "failure",
    UnreadableAttachmentError: "refusal",
}
#: Words of content filters in finish reasons of providers.
FILTER_WORDS = (
    "filter", "safety", "sensitive", "refus", "guardrail", "block", "prohibit", "recitation", "spii",
)  # fmt: skip
_CONDITIONS = ("budget_above", "tokens_above", "run_time_above")


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """A rule of a fallback chain: while all its conditions hold, the models before `use` are not asked.

    Args:
        budget_above: Share of the run's budget that is spent, from 0 to 1. A run without a budget never reaches it.
        tokens_above: Estimated input tokens of the request.
        run_time_above: Time since the run was started or resumed, s or `timedelta`.
        use: The first model that may be asked, as the chain names it; None: the last one.

    Raises:
        ValidationError: no condition is set, or a value is out of range.

    Examples:
        >>> When(budget_above=0.8, use="openai:gpt-4o-mini")
        When(budget_above=0.8, use='openai:gpt-4o-mini')
    """

    budget_above: float | None = None
    tokens_above: int | None = None
    run_time_above: timedelta | float | None = None
    use: str | None = None

    def __post_init__(self) -> None:
        if all(getattr(self, name) is None for name in _CONDITIONS):
            raise ValidationError(f"When needs a condition: one of [{', '.join(_CONDITIONS)}]")
        for name in _CONDITIONS:
            value: object = getattr(self, name)
            number = value.total_seconds() if isinstance(value, timedelta) else value
            if value is None:
                continue
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            most = 1.0 if name == "budget_above" else math.inf
            if not is_number or not 0 <= cast("float", number) < most:
                limit = "a number from 0 to below 1" if name == "budget_above" else "a number >= 0"
                raise ValidationError(f"When {name} must be {limit}, got: {value!r}")
        if self.use is not None and (not isinstance(self.use, str) or not self.use.strip()):
            raise ValidationError(f"When use must be the name of a model of the chain, got: {self.use!r}")

    @property
    def run_time_above_s(self) -> float | None:
        """The limit of the run's time, s."""
        limit = self.run_time_above
        return limit.total_seconds() if isinstance(limit, timedelta) else limit

    def to_data(self) -> dict[str, object]:
        """Return the set fields as JSON data."""
        values = {"budget_above": self.budget_above, "tokens_above": self.tokens_above}
        found = {**values, "run_time_above": self.run_time_above_s, "use": self.use}
        return {name: value for name, value in found.items() if value is not None}

    def __repr__(self) -> str:
        shown = ((each.name, getattr(self, each.name)) for each in fields(self))
        return f"When({', '.join(f'{name}={value!r}' for name, value in shown if value is not None)})"


class Fallback:
    """Models of which the next one is asked if one cannot answer. It is a model itself.

    Args:
        models: The models in their order, each a model or a string such as `"openai:gpt-4o-mini"`.
        on: Failures after which the next model is asked; by default all. `"quota"`: the account has no credit.
            `"refusal"`: the provider refuses the request, or its content filter cut the answer. `"breaker"`: the circuit breaker of
            the endpoint is open. `"failure"`: no answer after the retries of the run. `"context"`: the request is longer than
            the model's context. A class of exceptions counts, too, with its subclasses.
        when: Rules that leave out the first models.

    Raises:
        ValidationError: a model or a name is unknown, a chain is inside a chain, or there is no model.

    Examples:
        >>> Fallback(["openai:gpt-5", "openai:gpt-4o-mini"], on="quota").names
        ('openai:gpt-5', 'openai:gpt-4o-mini')
    """

    def __init__(
        self,
        models: Sequence[ChatModel | str],
        *,
        on: FallbackReason | type[Exception] | Sequence[FallbackReason | type[Exception]] = REASONS,
        when: When | Sequence[When] = (),
    ) -> None:
        if isinstance(models, str) or not isinstance(models, Sequence) or not models:
            raise ValidationError(f"Fallback models must be a list of models with at least one, got: {models!r}")
        self._models, self._names = tuple(map(resolve_llm, models)), _names_of(models)
        self._on: tuple[FallbackReason | type[Exception], ...] = _as_tuple(on)
        self._when: tuple[When, ...] = _as_tuple(when)
        self._check()
        self._classes = tuple(each for each in self._on if isinstance(each, type))

    def _check(self) -> None:
        for name, model in zip(self._names, self._models, strict=True):
            if chain_of(model) is not None:
                raise ValidationError(f"Fallback models: '{brief(name)}' is a chain itself. List its models instead")
        if not self._on:
            raise ValidationError(
                f"Fallback on must not be empty. Known: [{', '.join(REASONS)}], and exception classes"
            )
        for each in self._on:
            is_class = isinstance(each, type) and issubclass(each, Exception)
            if not is_class and each not in REASONS:
                raise ValidationError(
                    f"Fallback on: unknown failure {each!r}. Known: [{', '.join(REASONS)}], and exception classes"
                )
        for rule in self._when:
            if not isinstance(rule, When):
                raise ValidationError(f"Fallback when must be a When or a list of them, got: {type(rule).__name__}")
            self.place_of(rule)

    @property
    def models(self) -> tuple[ChatModel, ...]:
        """The models in their order."""
        return self._models

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models in errors and traces: the given strings, else the models' own names."""
        return self._names

    @property
    def on(self) -> tuple[FallbackReason | type[Exception], ...]:
        """Failures after which the next model is asked."""
        return self._on

    @property
    def when(self) -> tuple[When, ...]:
        """Rules that leave out the first models."""
        return self._when

    @property
    def first_model(self) -> ChatModel:
        """The first model: the declared one in records."""
        return self._models[0]

    @property
    def model_name(self) -> str:
        """The name of the first model."""
        return self.names_at(0).model or ""

    @property
    def provider_name(self) -> str:
        """The provider of the first model; empty if it is unknown."""
        return model_names(self._models[0]).provider or ""

    @property
    def reads(self) -> tuple[AttachmentKind, ...] | None:
        """Kinds of attachments that a model of the chain reads; None: an endpoint decides."""
        kinds = [kinds_read(model) for model in self._models]
        known = [set(each) for each in kinds if each is not None]
        return tuple(sorted(set().union(*known))) if len(known) == len(kinds) else None

    def check_key(self) -> None:
        """Raise `ValidationError` if an endpoint of the chain needs a key, and this process has none."""
        problems: list[str] = []
        for model in self._models:
            check = getattr(getattr(model, "delegate", model), "check_key", None)
            try:
                if callable(check):
                    check()
            except ValidationError as error:
                problems.append(message_of(error))
        if problems:
            raise ValidationError("; ".join(dict.fromkeys(problems)))

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Answer with the first model that can. Errors that are no failure of a model are raised unchanged.

        Raises:
            AllModelsFailedError: no model of several answered; the cause is the last error.
        """
        offered = (tools,) if tools else ()
        return (await self.first_answer(lambda model: call_user(model.chat, list(messages), *offered)))[1]

    async def chat_structured(self, messages: Sequence[ChatMessage], schema: JsonSchema) -> ChatResponse:
        """Answer as `chat` does, in the form of that schema if the model that answers supports schemas."""

        def ask(model: ChatModel) -> Awaitable[ChatResponse]:
            if isinstance(model, StructuredChatModel):
                return call_user(model.chat_structured, list(messages), schema)
            return call_user(model.chat, list(messages))

        return (await self.first_answer(ask))[1]

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncGenerator[str | ChatResponse]:
        """Yield the pieces of the first model that can answer. A model that cannot stream yields its whole answer."""
        failures = ModelFailures(self)
        for place, model in enumerate(self._models):
            has_begun = False
            try:
                if isinstance(model, StreamingChatModel):
                    async with aclosing(
                        cast("AsyncGenerator[str | ChatResponse]", model.stream(list(messages), tools))
                    ) as parts:
                        async for part in parts:
                            has_begun = True
                            yield part
                else:
                    yield await call_user(model.chat, list(messages), *((tools,) if tools else ()))
            except Exception as error:
                failures.note(place, error)
                if has_begun or place + 1 == len(self._models) or self.reason_of(error) is None:
                    failures.raise_all(error)
                    raise
            else:
                return

    async def first_answer(self, ask: Callable[[ChatModel], Awaitable[T]]) -> tuple[ChatModel, T]:
        """Return the first answer and its model; for calls outside tasks, so without retries and rules."""
        failures = ModelFailures(self)
        for place, model in enumerate(self._models):
            try:
                return model, await ask(model)
            except Exception as error:
                failures.note(place, error)
                if place + 1 == len(self._models) or self.reason_of(error) is None:
                    failures.raise_all(error)
                    raise
        raise IllegalStateError("the last model of a chain neither answered nor failed")

    def reason_of(self, error: BaseException) -> str | None:
        """Return why the next model is to be asked after an error of one; None: it is not."""
        if not isinstance(error, Exception) or isinstance(error, ExitEarlyError):
            return None
        if self._classes and isinstance(error, self._classes):
            return type(error).__name__
        reason = _reason_of(error)
        return reason if reason in self._on else None

    def reason_of_answer(self, response: ChatResponse) -> str | None:
        """Return the content filter's reason of an answer after which the next model is to be asked."""
        reason = incomplete_reason(response) if "refusal" in self._on else None
        return reason if reason is not None and any(word in reason for word in FILTER_WORDS) else None

    def names_at(self, place: int) -> ModelNames:
        """Return the names of a model for traces and records; a model without a name has the chain's."""
        names = model_names(self._models[place])
        return names if names.model is not None else ModelNames(self._names[place], names.provider)

    def find(self, names: ModelNames) -> int:
        """Return the place of the model with these names; 0: there is none."""
        return next((place for place in range(len(self._models)) if self.names_at(place) == names), 0)

    def place_of(self, rule: When) -> int:
        """Return the place of the first model that a rule leaves in."""
        if rule.use is None:
            return len(self._models) - 1
        for place, (name, model) in enumerate(zip(self._names, self._models, strict=True)):
            if rule.use in {name, model_names(model).model}:
                return place
        raise ValidationError(
            f"When use: the chain has no model '{brief(rule.use)}'. Known: [{', '.join(self._names)}]"
        )

    def around(self, wrap: Callable[[ChatModel], ChatModel]) -> Fallback:
        """Return the same chain of wrapped models."""
        wrapped = copy(self)
        wrapped._models = tuple(map(wrap, self._models))  # noqa: SLF001  a chain, too
        return wrapped

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fallback):
            return NotImplemented
        return (self._models, self._names, self._on, self._when) == (
            other._models,
            other._names,
            other._on,
            other._when,
        )

    def __hash__(self) -> int:
        return hash((self._names, self._on, self._when))

    def __repr__(self) -> str:
        shown = [f"[{', '.join(map(repr, self._models))}]"]
        if self._on != REASONS:
            shown.append(f"on={[each.__name__ if isinstance(each, type) else each for each in self._on]}")
        if self._when:
            shown.append(f"when={list(self._when)}")
        return f"Fallback({', '.join(shown)})"


class ModelFailures:
    """The errors of the models of one chain at one answer, in their order."""

    def __init__(self, chain: Fallback) -> None:
        self._chain = chain
        self._found: dict[str, str] = {}

    def note(self, place: int, error: BaseException | str) -> str:
        """Store an error, and return its text with the model's name."""
        name = self._chain.names[place]
        text = error if isinstance(error, str) else message_of(error) or type(error).__name__
        self._found[name] = text
        return f"{name}: {brief(text)}"

    def raise_all(self, error: Exception) -> None:
        """Raise one error for all models with the last error as its cause; do nothing for a single model (S-FBK-14)."""
        if len(self._found) > 1 and not isinstance(error, ExitEarlyError):
            raise AllModelsFailedError(self._found) from error


def resolve_chain(value: object) -> ChatModel:
    """Return the chain of a list of several models; of another value of `llm` its model (S-FBK-1).

    Raises:
        ValidationError: a model is unknown.
    """
    if not isinstance(value, list | tuple) or not value:
        return resolve_llm(value)
    models = cast("Sequence[ChatModel | str]", value)
    return resolve_llm(models[0]) if len(models) == 1 else Fallback(models)


def members_of(model: object) -> tuple[object, ...]:
    """Return the models of a chain, else the model itself."""
    chain = chain_of(model)
    return (model,) if chain is None else chain.models


def chain_of(model: object) -> Fallback | None:
    """Return the chain that a model is, also behind a rate limit, which its models then share; None: it is none."""
    if isinstance(model, Fallback):
        return model
    chain = getattr(model, "delegate", None)
    if not isinstance(chain, Fallback):
        return None
    return chain.around(cast("Callable[[ChatModel], ChatModel]", cast("Any", model).around))


def _reason_of(error: Exception) -> FallbackReason | None:
    for cls, reason in _REASON_OF_CLASS.items():
        if isinstance(error, cls):
            return reason
    if isinstance(error, EnsembleError):
        return None
    status, body = status_of(error), provider_answer_of(error)
    if body.is_out_of_credit:
        return "quota"
    if body.is_too_long:
        return "context"
    if fault_of(error) is not None:
        return "failure"
    if status is not None and CLIENT_ERROR <= status < SERVER_ERROR:
        return "refusal"
    # An unreadable answer, an untrusted certificate.
    return "failure" if status is not None or is_provider_error(error) else None


def _as_tuple(value: object) -> tuple[Any, ...]:
    return tuple(cast("Sequence[object]", value)) if isinstance(value, list | tuple) else (value,)


def _names_of(given: Sequence[object]) -> tuple[str, ...]:
    names: list[str] = []
    for each in given:
        name = each.strip() if isinstance(each, str) else model_names(each).model or type(each).__name__
        names.append(name if name not in names else f"{name}#{len(names) + 1}")
    return tuple(names)
