"""How a team file says review gates, and who decides at them (S-REV-100 to S-REV-102). Package: loader."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import PlainValidator, TypeAdapter, ValidationInfo

from ensemble_ray.errors import ValidationError
from ensemble_ray.execute.review.handlers import ReviewHandler
from ensemble_ray.loader.document import Entries
from ensemble_ray.loader.field_types import ReferenceText, text_in
from ensemble_ray.loader.problems import suggestion
from ensemble_ray.loader.reading import context_of
from ensemble_ray.loader.references import is_reference
from ensemble_ray.loader.section import FileSection, keys_of
from ensemble_ray.loader.user_code import object_with
from ensemble_ray.values.reviews import Review

__all__ = ["ReviewHandlerName", "ReviewName"]

_WORDS = ("required", "skip")
_HANDLERS = ("console", "auto_approve")


@keys_of(Review, without={"is_skip"})
class ReviewKeys(FileSection):
    """A gate."""

    called: ClassVar[str] = "a review"


def _read_review(node: object, info: ValidationInfo) -> Review:
    if isinstance(node, Entries):
        built: Review = ReviewKeys.model_validate(node, context=context_of(info)).build()
        return built
    match text_in(node):
        case "required":
            return Review.required()
        case "skip":
            return Review.skip()
        case None:
            raise ValidationError("must be `required`, `skip`, or a mapping with keys such as 'prompt'")
        case word:
            raise ValidationError(f"unknown word '{word}'.{suggestion(word, _WORDS)} Known: [{', '.join(_WORDS)}]")


def _read_handler(node: object, info: ValidationInfo) -> object:
    match text_in(node):
        case "console":
            return ReviewHandler.console()
        case "auto_approve":
            return ReviewHandler.auto_approve()
        case str(word) if not is_reference(word):
            hint = suggestion(word, _HANDLERS)
            raise ValidationError(f"must be `console`, `auto_approve`, or module:attribute, got: '{word}'.{hint}")
        case _:
            return _HANDLER.validate_python(node, context=info.context)


_HANDLER: TypeAdapter[Any] = TypeAdapter(Annotated[object, object_with("review")])
ReviewName = Annotated[
    object, PlainValidator(_read_review, json_schema_input_type=Literal["required", "skip"] | ReviewKeys)
]
ReviewHandlerName = Annotated[
    object, PlainValidator(_read_handler, json_schema_input_type=Literal["console", "auto_approve"] | ReferenceText)
]
