"""Read attachments from paths, and from URLs under the rules of the web tools."""

from __future__ import annotations

from typing import TypeVar

from ensemble_ray.errors import ValidationError
from ensemble_ray.process.concurrency import threads
from ensemble_ray.values.attachments import MOST_BYTES, Attachment

_TIMEOUT_S = 60.0
_A = TypeVar("_A", bound=Attachment)


async def read_attachment(attachment: _A) -> _A:
    """Return an attachment with its content or as a reference, or raise a `ValidationError` that names the reason."""
    if attachment.is_read and not attachment.source:
        return attachment
    if not attachment.is_url:
        return await threads.run(attachment.read)
    from ensemble_ray.tools.web.net import RequestFailedError, fetch  # heavy, and few runs fetch pages

    try:
        answer = await fetch(
            attachment.source,
            headers={"user-agent": "ensemble-ray"},
            max_bytes=MOST_BYTES,
            timeout_s=_TIMEOUT_S,
            allow_private_hosts=attachment.allow_private_hosts,
        )
    except RequestFailedError as error:
        advice = ". allow_private_hosts=True permits it" if "is refused" in str(error) else ""
        raise ValidationError(f"{attachment.label} cannot be fetched: {error}{advice}") from error
    if not answer.is_success:
        raise ValidationError(f"{attachment.label} cannot be fetched: its server answered HTTP {answer.status}")
    if answer.is_truncated:
        raise ValidationError(
            f"{attachment.label} is larger than {MOST_BYTES:,} bytes, the limit. Attach a smaller file"
        )
    return attachment.with_data(answer.body, answer.headers.get("content-type", ""))
