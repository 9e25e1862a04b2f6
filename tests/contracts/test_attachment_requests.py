"""Attachments as the chat-completions protocol sends them, against the types of the `openai` package."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import cast

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionUserMessageParam
from openai.types.responses import EasyInputMessageParam

from ensemble_ray import (
    Audio,
    ChatMessage,
    File,
    Image,
    JsonSchema,
    OpenAIChatModel,
    OpenAIResponsesModel,
    UnreadableAttachmentError,
)
from ensemble_ray.llm.protocol.request import MessageRoles, RequestOptions
from ensemble_ray.testing import Fault, ModelServer
from ensemble_ray.values.attachments import Attachment

PNG, WAV, MP3 = b"\x89PNG\r\n\x1a\n...", b"RIFF\0\0\0\0WAVE...", b"ID3..."
PDF = b"%PDF-1.7..."


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _sent(*messages: ChatMessage, roles: MessageRoles | None = None) -> Sequence[dict[str, object]]:
    options = RequestOptions.of("m", {}, "model")
    body = options.encode(messages) if roles is None else options.encode(messages, (), roles)
    return cast("list[dict[str, object]]", json.loads(body)["messages"])


@pytest.mark.parametrize(
    ("attachment", "part"),
    [
        (Image(PNG), {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_text(PNG)}"}}),
        (Image("https://x.y/a.png"), {"type": "image_url", "image_url": {"url": "https://x.y/a.png"}}),
        (Audio(WAV), {"type": "input_audio", "input_audio": {"data": _text(WAV), "format": "wav"}}),
        (Audio(MP3), {"type": "input_audio", "input_audio": {"data": _text(MP3), "format": "mp3"}}),
        (
            File(PDF, name="a.pdf"),
            {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{_text(PDF)}"}},
        ),
        (File(b"a;b", name="a.csv"), {"type": "text", "text": "## File: a.csv\na;b"}),
        (File(b"{}", name="a.json"), {"type": "text", "text": "## File: a.json\n{}"}),
    ],
)
def test_part_has_the_form_of_the_protocol(attachment: Attachment, part: dict[str, object]) -> None:
    """S-ATT-20, S-ATT-21: after the text."""
    (message,) = _sent(ChatMessage("user", "Look", attachments=(attachment,)))
    assert message == {"role": "user", "content": [{"type": "text", "text": "Look"}, part]}
    pydantic.TypeAdapter(ChatCompletionUserMessageParam).validate_python(message)


async def test_parts_have_the_form_of_the_responses_api(model_server: Callable[..., ModelServer]) -> None:
    """S-ATT-28: also as the test server reads them."""
    server = model_server()
    model = OpenAIResponsesModel("m", base_url=server.base_url, api_key="k")
    await model.chat(
        [ChatMessage("user", "Look", attachments=(Image(PNG), File(PDF, name="a.pdf"), File(b"a;b", name="a.csv")))]
    )
    (request,) = server.requests
    (item,) = request.body["input"]
    assert item["content"] == [
        {"type": "input_text", "text": "Look"},
        {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{_text(PNG)}"},
        {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{_text(PDF)}"},
        {"type": "input_text", "text": "## File: a.csv\na;b"},
    ]
    pydantic.TypeAdapter(EasyInputMessageParam).validate_python(item)
    assert [each.read().require_data() for each in request.attachments] == [PNG, PDF]
    assert request.text == "Look\n## File: a.csv\na;b"


def test_other_audio_is_named_by_its_media_type() -> None:
    """S-ATT-20: endpoints other than OpenAI's accept more formats."""
    (message,) = _sent(ChatMessage("user", None, attachments=(Audio(b"fLaC..."),)))
    assert message["content"] == [{"type": "input_audio", "input_audio": {"data": _text(b"fLaC..."), "format": "flac"}}]


def test_message_without_attachments_is_sent_as_before() -> None:
    """S-ATT-20."""
    assert _sent(ChatMessage("user", "Look")) == [{"role": "user", "content": "Look"}]


def test_merged_message_has_all_attachments() -> None:
    """S-ATT-25, S-ATT-20: in their order, after the joined text."""
    files = [File(text, name="n") for text in (b"1", b"2")]
    messages = [
        ChatMessage("system", "Be brief"),
        *(ChatMessage("user", "Look", attachments=(each,)) for each in files),
    ]
    (merged,) = _sent(*messages, roles=MessageRoles(system="user", are_merged=True))
    texts = [cast("dict[str, str]", part)["text"] for part in cast("list[object]", merged["content"])]
    assert texts == ["Be brief\n\nLook\n\nLook", "## File: n\n1", "## File: n\n2"]


async def _call(model: OpenAIChatModel, how: str, messages: Sequence[ChatMessage]) -> object:
    if how == "chat":
        return await model.chat(messages)
    if how == "structured":
        return await model.chat_structured(messages, JsonSchema("a", {"type": "object"}))
    return [part async for part in model.stream(messages)]


@pytest.mark.parametrize("how", ["chat", "structured", "stream"])
@pytest.mark.parametrize(
    ("status", "text"),
    [
        (400, "Invalid content type. image_url is only supported by certain models."),
        (400, "This model does not support image inputs"),
        (404, "No endpoints found that support image input"),
        (422, "messages[1]: unknown variant `image_url`, expected `text`"),
        (500, "This model is not a multimodal model"),
    ],
)
async def test_refusal_of_an_attachment_is_explained(
    model_server: Callable[..., ModelServer], how: str, status: int, text: str
) -> None:
    """S-ATT-24: with the text of the endpoint and its error as the cause."""
    server = model_server(lambda _: Fault(status=status, message=text))
    model = OpenAIChatModel("m", base_url=server.base_url, api_key="k", structured_outputs=None)
    with pytest.raises(UnreadableAttachmentError) as refused:
        await _call(model, how, [ChatMessage("user", "Look", attachments=(Image(PNG, name="a.png"),))])
    assert str(refused.value).startswith("The endpoint of model 'm' refused a request with Image 'a.png': ")
    assert text in str(refused.value)
    assert isinstance(refused.value.__cause__, openai.APIStatusError)


@pytest.mark.parametrize(
    ("attachments", "status", "text"),
    [
        ((), 400, "This model does not support image inputs"),
        ((Image(PNG),), 401, "This image key is not valid"),
        ((Image(PNG),), 400, "Too many tokens"),
    ],
)
async def test_other_error_stays_as_it_is(
    model_server: Callable[..., ModelServer], attachments: Sequence[Attachment], status: int, text: str
) -> None:
    """S-ATT-24."""
    server = model_server(lambda _: Fault(status=status, message=text))
    model = OpenAIChatModel("m", base_url=server.base_url, api_key="k")
    with pytest.raises(openai.APIStatusError):
        await model.chat([ChatMessage("user", "Look", attachments=attachments)])


def test_model_declares_what_it_reads() -> None:
    """S-ATT-23: as data, in copies too; unknown by default."""
    assert OpenAIChatModel("m").reads is None
    model = OpenAIChatModel("m", reads=("image",))
    assert (model.reads, repr(model)) == (("image",), "OpenAIChatModel('m', reads=('image',))")
    with pytest.raises(ValueError, match=r"reads must be kinds of \[image, audio, file\], got: 'video'"):
        OpenAIChatModel("m", reads=("video",))  # type: ignore[arg-type]
