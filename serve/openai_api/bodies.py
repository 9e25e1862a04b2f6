"""What clients of the OpenAI API send. Pure.

Fields that are not named here are passed over, as servers of this API do with those that they do not know: `temperature`, `max_tokens`
and other settings of a model are the team's own. Fields that would change what an answer is are named, and refused where they are set.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, StrictBool

from ensemble_ray.serve.openai_api.errors import wrong_parameter
from ensemble_ray.serve.run_schemas import RunTags
from ensemble_ray.serve.schemas import Text
from ensemble_ray.text.foreign_text import whole_data

_Name = Annotated[str, Field(min_length=1, max_length=256), BeforeValidator(whole_data)]
#: What an answer of a team cannot be, and the values that ask for nothing.
_NOTHING: tuple[JsonValue, ...] = (None, False, 0, "", [], {})
_CHAT = ("tools", "functions", "logprobs", "top_logprobs", "audio", "web_search_options", "stop")
_RESPONSE = ("tools", "top_logprobs", "previous_response_id", "conversation", "background", "prompt")
_WHY = {
    "previous_response_id": "send what was said before as messages of 'input'",
    "conversation": "send what was said before as messages of 'input'",
    "background": "begin the run with POST /runs, and ask for it with GET /v1/responses/{run_id}",
    "tools": "a team has its own tools",
    "functions": "a team has its own tools",
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class MessageBody(_Body):
    """A message of a conversation.

    Attributes:
        role: Who said it; items that are no messages have none.
        content: A text, or parts of it.
    """

    role: str = ""
    type: str = "message"
    content: Text | list[dict[str, JsonValue]] | None = None


class StreamOptions(_Body):
    """How a stream is told.

    Attributes:
        include_usage: Whether its last chunk has the tokens.
    """

    include_usage: StrictBool | None = None


class ChatBody(_Body):
    """Body of `POST /v1/chat/completions`.

    Attributes:
        model: The team's name.
        messages: The last one of the user is the team's input.
        metadata: The run's tags.
    """

    model: _Name
    messages: list[MessageBody] = Field(min_length=1)
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    metadata: RunTags | None = None
    n: JsonValue = None
    response_format: JsonValue = None
    modalities: JsonValue = None
    tools: JsonValue = None
    functions: JsonValue = None
    logprobs: JsonValue = None
    top_logprobs: JsonValue = None
    audio: JsonValue = None
    web_search_options: JsonValue = None
    stop: JsonValue = None

    def check(self) -> None:
        """Refuse what no team can do.

        Raises:
            Refusal: it names the field.
        """
        if self.n is not None and (isinstance(self.n, bool) or self.n != 1):
            raise wrong_parameter("n", "n: a run of a team gives one answer; send the request again for another one")
        if self.modalities is not None and self.modalities != ["text"]:
            raise wrong_parameter("modalities", "modalities: teams answer in text alone")
        _check_format(self.response_format, "response_format")
        _check_unset(self, _CHAT)
        if self.stream_options is not None and not self.stream:
            raise wrong_parameter("stream_options", "stream_options: they are of use with stream=true alone")


class ResponseBody(_Body):
    """Body of `POST /v1/responses`.

    Attributes:
        model: The team's name.
        input: The message, or messages, of which the last one of the user is the team's input.
        instructions: The first of what was said before.
        metadata: The run's tags.
    """

    model: _Name
    input: Text | Annotated[list[MessageBody], Field(min_length=1)]
    instructions: Text | None = None
    stream: StrictBool | None = None
    metadata: RunTags | None = None
    text: JsonValue = None
    tools: JsonValue = None
    top_logprobs: JsonValue = None
    previous_response_id: JsonValue = None
    conversation: JsonValue = None
    background: JsonValue = None
    prompt: JsonValue = None

    def check(self) -> None:
        """Refuse what no team can do.

        Raises:
            Refusal: it names the field.
        """
        if self.text is not None and not isinstance(self.text, dict):
            raise wrong_parameter("text", "text: must be an object", code="INVALID_REQUEST")
        _check_format(None if self.text is None else self.text.get("format"), "text.format")
        _check_unset(self, _RESPONSE)


def _check_format(value: JsonValue, name: str) -> None:
    if value is not None and not (isinstance(value, dict) and value.get("type") == "text"):
        raise wrong_parameter(
            name, f"{name}: the form of an answer is the team's own (the output_type of its last task); ask for text"
        )


def _check_unset(body: BaseModel, names: tuple[str, ...]) -> None:
    for name in names:
        value: JsonValue = getattr(body, name)
        if not any(value == each for each in _NOTHING):
            why = _WHY.get(name, "leave it out")
            raise wrong_parameter(name, f"{name}: teams do not take it; {why}")
