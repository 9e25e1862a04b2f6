"""Attachments of model calls: whether a model reads them, and their contents from the record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ensemble_ray.errors import RecordError, UnreadableAttachmentError
from ensemble_ray.ports import Journal
from ensemble_ray.tools.web.attachments import read_attachment
from ensemble_ray.values.attachments import Attachment, behind_limits, kinds_read
from ensemble_ray.values.messages import ChatMessage


def check_messages(model: object, messages: Sequence[ChatMessage]) -> None:
    """Raise `UnreadableAttachmentError` if the model does not read an attachment of the messages (S-ATT-23)."""
    for message in messages:
        if message.attachments:
            check_readable(model, message.attachments)


def check_readable(model: object, attachments: Iterable[Attachment], subject: str = "") -> None:
    """Raise `UnreadableAttachmentError` for the first attachment of a kind that the model does not read.

    A model declares the kinds by its attribute `reads`; None: its endpoint decides. A model without it reads none.
    `subject` begins the text.
    """
    for each in attachments:
        if not is_readable(model, each):
            model, reads = behind_limits(model), kinds_read(model) or ()
            name = getattr(model, "model", None)
            named = f"model '{name}'" if isinstance(name, str) and name else type(model).__name__
            able = f"only {', '.join(sorted(reads))}" if reads else "no attachments"
            raise UnreadableAttachmentError(
                f"{subject}{named} does not read {each.label}; it reads {able}. Choose a model that reads {each.kind} "
                f"attachments, or declare that it does: reads=('{each.kind}',)"
            )


def is_readable(model: object, attachment: Attachment) -> bool:
    """Whether the model may read that kind of attachments."""
    reads = kinds_read(model)
    return reads is None or attachment.kind in reads


async def store_results(
    attachments: Sequence[Attachment], model: object, journal: Journal
) -> tuple[tuple[Attachment, ...], tuple[Attachment, ...]]:
    """Read and store attachments that a tool returned; return those that the model reads, and the others.

    A `ValidationError`: one cannot be read.
    """
    kept: list[Attachment] = []
    for each in attachments:
        if not is_readable(model, each):
            continue
        read = await read_attachment(each)
        is_stored = read.data is not None and await journal.store_content(read.data)
        kept.append(read.as_reference() if is_stored else read)
    return tuple(kept), tuple([each for each in attachments if not is_readable(model, each)])


async def load_attachments(attachments: Sequence[Attachment], journal: Journal) -> tuple[Attachment, ...]:
    """Return attachments with their contents."""
    return tuple([await _load(each, journal) for each in attachments])


async def load_messages(messages: Sequence[ChatMessage], journal: Journal) -> list[ChatMessage]:
    """Return the messages with the contents of their attachments."""
    return [
        replace(each, attachments=await load_attachments(each.attachments, journal)) if each.attachments else each
        for each in messages
    ]


def without_contents(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Return the messages with references, for events and traces."""
    return tuple(
        replace(each, attachments=tuple([one.as_reference() for one in each.attachments])) if each.attachments else each
        for each in messages
    )


async def _load(attachment: Attachment, journal: Journal) -> Attachment:
    if attachment.data is not None:
        return attachment
    content = await journal.read_content(attachment.sha256)
    if content is None:
        raise RecordError(f"The record is damaged: the content of {attachment.label} ({attachment.sha256}) is missing")
    try:
        return attachment.with_data(content)
    except ValueError as error:
        raise RecordError(f"The record is damaged: {error}") from error
