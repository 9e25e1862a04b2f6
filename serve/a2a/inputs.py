"""A message's parts as inputs of a run, or as a decision at a gate (S-INT-72, S-INT-75). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from http import HTTPStatus

from a2a.types import Part
from pydantic import JsonValue, ValidationError

from ensemble_ray.serve.a2a.cards import missing_beside_text
from ensemble_ray.serve.control_schemas import NewDecision, Verdict
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.run_schemas import EnsembleInfo, OpenReview
from ensemble_ray.text.foreign_text import whole_text
from ensemble_ray.tools.a2a.connecting import plain_value

#: Told with every question.
HOW_TO_DECIDE = (
    "Answer with a message on this task: the text approve, exit or 'edit: NEW TEXT', or a data part "
    '{"gate_id": ..., "decision": "approve" | "edit" | "exit", "text": ..., "comment": ...}'
)
_EDIT = "edit:"


def inputs_of(parts: Sequence[Part], info: EnsembleInfo) -> dict[str, JsonValue]:
    """Return the inputs of a run of a team.

    Raises:
        Refusal: a part is neither text nor an object, an input comes twice, or the text has no input to go to.
    """
    texts, data = _read(parts)
    if texts is None:
        return data
    beside = [name for name in missing_beside_text(info) if name not in data]
    if info.chat.input is None or beside:
        needed = ", ".join(info.inputs) or "none"
        raise _wrong(
            f"The team '{info.name}' cannot be asked by a text alone. Send its inputs as one data part. It needs: [{needed}]"
        )
    if info.chat.input in data:
        raise _wrong(f"The input '{info.chat.input}' comes twice: as a text, and in a data part")
    return {**data, info.chat.input: texts}


def decision_of(parts: Sequence[Part], reviews: Sequence[OpenReview]) -> tuple[str, NewDecision]:
    """Return the gate that a message decides, and the decision.

    Raises:
        Refusal: it decides nothing, or does not say which of several gates.
    """
    texts, data = _read(parts)
    gate = data.pop("gate_id", None)
    if texts is not None and data:
        raise _wrong(f"A decision is a text or a data part, and not both. {HOW_TO_DECIDE}")
    decision = _parse_decision(texts) if texts is not None else _check_decision(data)
    known = [each.gate_id for each in reviews]
    if gate is None and len(known) == 1:
        return known[0], decision
    if not isinstance(gate, str) or gate not in known:
        raise _wrong(f"Say in a data part which gate is decided, as gate_id. There are: [{', '.join(known)}]")
    return gate, decision


def _parse_decision(text: str) -> NewDecision:
    word = text.strip()
    match word.lower().rstrip(".!"):
        case "approve":
            return NewDecision(decision=Verdict.APPROVE)
        case "exit":
            return NewDecision(decision=Verdict.EXIT)
        case _ if word.lower().startswith(_EDIT):
            return NewDecision(decision=Verdict.EDIT, text=word[len(_EDIT) :].strip())
        case _:
            raise _wrong(f"The run waits for a decision, and this text is none. {HOW_TO_DECIDE}")


def _check_decision(data: dict[str, JsonValue]) -> NewDecision:
    try:
        return NewDecision.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:5])
        raise _wrong(f"The data part is no decision: {problems}. {HOW_TO_DECIDE}") from None


def _read(parts: Iterable[Part]) -> tuple[str | None, dict[str, JsonValue]]:
    """Return the text of a message, None where it has none, and what its data parts say together."""
    texts: list[str] = []
    data: dict[str, JsonValue] = {}
    for index, part in enumerate(parts):
        match part.WhichOneof("content"):
            case "text":
                texts.append(whole_text(part.text))
            case "data":
                try:
                    value = plain_value(part.data)
                except ValueError as error:
                    raise _wrong(f"parts[{index}].data: a number is not one of JSON") from error
                if not isinstance(value, dict):
                    raise _wrong(f"parts[{index}].data: must be an object with the inputs by name")
                if twice := sorted(data.keys() & value.keys()):
                    raise _wrong(f"parts[{index}].data: [{', '.join(twice)}] came before")
                data |= value
            case kind:
                raise _wrong(f"parts[{index}]: a team takes texts and data, and no '{kind or 'empty'}' part")
    return ("\n\n".join(texts) if texts else None), data


def _wrong(text: str) -> Refusal:
    return Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "INVALID_REQUEST", text)
