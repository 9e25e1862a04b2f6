"""The section `evaluation` of a team file, and scorers as texts of a command (S-EVL-40)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, cast

import pydantic
from msgspec import Struct
from pydantic import PlainValidator, TypeAdapter, ValidationInfo

from ensemble_ray.teamfile.document import (
    Entries,
    Items,
    Located,
    Problems,
    Scalar,
    list_known_names,
    read_document,
    suggestion,
)
from ensemble_ray.teamfile.fields import Model
from ensemble_ray.teamfile.references import is_reference
from ensemble_ray.teamfile.section import (
    CallableName,
    FileSection,
    Flag,
    Number,
    PathText,
    Reading,
    ReferenceText,
    Text,
    Whole,
    context_of,
    key,
    mapping,
    refuse,
    report,
    text_in,
)


class DeclaredScorer(Struct, frozen=True, kw_only=True):
    """A scorer of a file: its kind, and the arguments of its class."""

    kind: str
    values: Mapping[str, Any] = {}


class _ScorerKeys(FileSection):
    name: Text = key("Names its scores. Default: the kind of the scorer.")


class _ExactKeys(_ScorerKeys):
    called: ClassVar[str] = "the scorer 'exact'"
    ignore_case: Flag = key("Whether upper and lower case are equal.")


class _ContainsKeys(_ScorerKeys):
    called: ClassVar[str] = "the scorer 'contains'"
    texts: list[Text] = key("Texts that the output must contain. Default: `expected` of the case.")
    ignore_case: Flag = key("Whether upper and lower case are equal.")


class _RegexKeys(_ScorerKeys):
    called: ClassVar[str] = "the scorer 'regex'"
    pattern: Text = key("A regular expression of Python. Default: `expected` of the case.")


class _JsonFieldsKeys(_ScorerKeys):
    called: ClassVar[str] = "the scorer 'json_fields'"
    names: list[Text] = key("Names of compared fields, such as `total.amount`. Default: all fields of `expected`.")
    tolerance: Number = key("Largest absolute difference of numbers.")


class _NumericKeys(_ScorerKeys):
    called: ClassVar[str] = "the scorer 'numeric'"
    tolerance: Number = key("Largest absolute difference.")
    relative: Number = key("Largest difference as a share of `expected`, such as 0.01.")


class _SimilarityKeys(_ScorerKeys):
    called: ClassVar[str] = "the scorer 'similarity'"
    model: Text = key("The embedding model: `local` (default) or `openai:MODEL`.")


class _JudgeKeys(_ScorerKeys):
    called: ClassVar[str] = "the scorer 'judge'"
    rubric: Text = key("What a good output is, for the model.", is_required=True)
    llm: Model = key("The model that judges. Default: the team's `llm`.")


class _FunctionKeys(_ScorerKeys):
    called: ClassVar[str] = "the scorer 'function'"
    function: CallableName = key("Called with the output and the case: module:function.", is_required=True)


_KINDS: Mapping[str, type[_ScorerKeys]] = {
    "exact": _ExactKeys, "contains": _ContainsKeys, "regex": _RegexKeys, "json_fields": _JsonFieldsKeys,
    "numeric": _NumericKeys, "similarity": _SimilarityKeys, "judge": _JudgeKeys, "function": _FunctionKeys,
}  # fmt: skip
#: Kinds without a form of their name alone.
_NEEDING = frozenset({"judge", "function"})
_FUNCTION = TypeAdapter[object](CallableName)
_FORMS = "a scorer is a name, module:function, or a mapping such as {numeric: {tolerance: 0.1}}"


def _read_scorer(node: object, info: ValidationInfo) -> DeclaredScorer:
    name = text_in(node)
    if name is not None and is_reference(name):
        function = _FUNCTION.validate_python(node, context=info.context)
        return DeclaredScorer(kind="function", values={"function": function})
    if name is not None:
        kind = _known(name)
        if kind in _NEEDING:
            raise refuse(f"the scorer '{kind}' needs options. Keys: [{', '.join(_KINDS[kind].list_keys())}]")
        return DeclaredScorer(kind=kind)
    if not isinstance(node, Entries) or len(node) != 1:
        raise refuse(f"{_FORMS}. {list_known_names(_KINDS)}")
    kind, given = next(iter(node.items()))
    section = _KINDS[_known(kind)]
    if isinstance(given, Scalar) and given.value is None:
        given = Entries(given.spot, {}, {})
    read = TypeAdapter(dict[str, section]).validate_python({kind: given}, context=info.context)  # type: ignore[valid-type]
    return DeclaredScorer(kind=kind, values=cast("FileSection", read[kind]).values())


def _known(kind: str) -> str:
    if kind not in _KINDS:
        raise refuse(
            f"unknown scorer '{kind}'.{suggestion(kind, _KINDS)} {list_known_names(_KINDS)}, or module:function"
        )
    return kind


def _schema_of_kinds() -> Any:
    forms: list[Any] = []
    for kind, section in _KINDS.items():
        options: Any = section if kind in _NEEDING else section | None
        forms.append(dict[Literal[kind], options])  # type: ignore[valid-type]
    return Union[*forms]


ScorerForm = Annotated[
    object,
    PlainValidator(
        _read_scorer,
        json_schema_input_type=Literal[*(kind for kind in _KINDS if kind not in _NEEDING)]
        | ReferenceText
        | _schema_of_kinds(),
    ),
]


class EvaluationKeys(FileSection):
    called = "the evaluation"
    cases: PathText = key("The cases: a .jsonl or .csv file, relative to this file.")
    repeats: Whole = key("Runs of each case. Default: 1.")
    concurrency: Whole = key("Cases that run at the same time. Default: 4.")
    max_tokens: Whole = key("Tokens that each run may spend.")
    max_cost: Number = key("Money that each run may spend.")
    scorers: list[ScorerForm] = key(
        "`exact`, `contains`, `regex`, `json_fields`, `numeric`, `similarity`, module:function, or a mapping with options, such "
        "as `judge: {rubric: ...}`."
    )
    minimum: Annotated[dict[str, Number], mapping("must be a mapping of scorers to numbers")] = key(
        "Least means by scorer; the command fails if one is missed."
    )


def _read_evaluation(node: object, info: ValidationInfo) -> object:
    """Keys of judges are needed only by an evaluation, and `--llm` replaces no judge."""
    given = context_of(info)
    reading = Reading(
        given.directory, llm=None, needs_keys=given.needs_keys and given.evaluates, evaluates=given.evaluates
    )
    return EvaluationKeys.model_validate(node, context=reading)


EvaluationSection = Annotated[object, PlainValidator(_read_evaluation, json_schema_input_type=EvaluationKeys)]


class _Scorers(FileSection):
    scorers: list[ScorerForm] = key()


def read_scorers(texts: list[str], directory: Path, option: str) -> list[DeclaredScorer]:
    """Read scorers in the form of a team file: `exact`, or `numeric: {tolerance: 0.1}`. `option` begins messages.

    Raises:
        ValidationError: one of them is wrong.
    """
    problems, nodes = Problems(option), list[Located]()
    for text in texts:
        node = read_document(text, problems)
        if node is not None:
            nodes.append(node)
    problems.check()
    spot = nodes[0].spot
    root = Entries(spot, {"scorers": Items(spot, nodes)}, {"scorers": spot})
    try:
        found = _Scorers.model_validate(root, context=Reading(directory, llm=None, needs_keys=True))
    except pydantic.ValidationError as error:
        report(error, root, problems)
        problems.check()
        raise
    return [each for each in found.scorers if isinstance(each, DeclaredScorer)]
