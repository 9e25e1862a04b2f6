"""Attachments as content parts of chat completions, one function per kind, and refusals of them by endpoints."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence

from ensemble_ray.errors import UnreadableAttachmentError, message_of
from ensemble_ray.errors.texts import brief
from ensemble_ray.errors.travel import status_of
from ensemble_ray.values.attachments import Attachment, AttachmentKind
from ensemble_ray.values.messages import ChatMessage

#: Formats by media type, as the protocol names them; others are named by their media type.
_AUDIO_FORMATS = {"audio/mpeg": "mp3", "audio/mp4": "m4a"}
_REFUSALS = frozenset({400, 404, 415, 422, 500, 501})
_SUBJECT = re.compile(
    r"image|audio|vision|multi.?modal|\bfiles?\b|file_data|\bpdf\b|content (type|part)|unknown variant", re.IGNORECASE
)
_NEGATIVE = re.compile(
    r"\bnot\b|n't|cannot|unsupported|invalid|unexpected|unknown|\bonly\b|\bmust\b|no endpoints|missing", re.IGNORECASE
)


def text_part(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def image_part(image: Attachment) -> dict[str, object]:
    """The endpoint fetches the URL of an unread image; runs read URLs before."""
    url = image.source if image.is_url and image.data is None else image.data_url
    return {"type": "image_url", "image_url": {"url": url}}


def audio_part(audio: Attachment) -> dict[str, object]:
    read = audio.read()
    form = _AUDIO_FORMATS.get(read.media_type) or read.media_type.partition("/")[2]
    content = base64.b64encode(read.require_data()).decode()
    return {"type": "input_audio", "input_audio": {"data": content, "format": form}}


def file_part(file: Attachment) -> dict[str, object]:
    """Endpoints accept few types of files, but every model reads text."""
    read = file.read()
    if read.is_text:
        text = read.require_data().decode(errors="replace")
        return text_part(f"## File: {read.name}\n{text}")
    return {"type": "file", "file": {"filename": read.name, "file_data": read.data_url}}


_PARTS: Mapping[AttachmentKind, Callable[[Attachment], dict[str, object]]] = {
    "image": image_part,
    "audio": audio_part,
    "file": file_part,
}


def content_parts(message: ChatMessage) -> list[dict[str, object]]:
    """Return the content of a message with attachments: its text, then each attachment."""
    texts = [text_part(message.content)] if message.content else []
    return [*texts, *(_PARTS[each.kind](each) for each in message.attachments)]


def attached_to(messages: Sequence[ChatMessage]) -> list[Attachment]:
    return [each for message in messages for each in message.attachments]


def as_refusal(error: Exception, attachments: Sequence[Attachment], model: str) -> UnreadableAttachmentError | None:
    """Return a clear error if an endpoint refused attachments, else None."""
    text = message_of(error)
    if status_of(error) not in _REFUSALS or not _SUBJECT.search(text) or not _NEGATIVE.search(text):
        return None
    shown = ", ".join(each.label for each in attachments[:3])
    return UnreadableAttachmentError(
        f"The endpoint of model '{model}' refused a request with {shown}: {brief(text)}. Choose a model that reads it, or "
        "send another format. reads=() declares that a model reads no attachments"
    )
