"""Pictures, audio and files that messages carry: from a path, a URL or bytes, identified by the hash of their content."""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import ClassVar, Literal, Self, TypeVar, cast
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from ensemble_ray.errors import ValidationError
from ensemble_ray.text.foreign_text import estimate_tokens, one_line

_A = TypeVar("_A", bound="Attachment")
AttachmentKind = Literal["image", "audio", "file"]

#: Of one attachment. Providers accept at most about 50 MB in a request.
MOST_BYTES = 50_000_000
_IMAGE_TOKENS = 1_000  # a picture of about a megapixel
_BYTES_OF_AUDIO_TOKEN = 1_000  # ten or more tokens for a second of compressed audio
_BYTES_OF_FILE_TOKEN = 50  # a page of a PDF has some ten kilobytes, and is read as text and as a picture
_TEXT_TYPES = frozenset({"application/json", "application/yaml", "application/xml", "application/x-ndjson"})
_LONGEST_NAME = 120
_ORIGIN_DIGITS = 16
_UNKNOWN_TYPE = "application/octet-stream"
_MEDIA_TYPE = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,63}/[a-z0-9][a-z0-9!#$&^_.+-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
#: (first bytes, offset of the second, second, media type); the first match counts
_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", 0, b"", "image/png"),
    (b"\xff\xd8\xff", 0, b"", "image/jpeg"),
    (b"GIF8", 0, b"", "image/gif"),
    (b"RIFF", 8, b"WEBP", "image/webp"),
    (b"RIFF", 8, b"WAVE", "audio/wav"),
    (b"", 4, b"ftypavif", "image/avif"),
    (b"", 4, b"ftyphei", "image/heic"),
    (b"", 4, b"ftypM4A", "audio/mp4"),
    (b"BM", 6, b"\0\0\0\0", "image/bmp"),
    (b"II*\0", 0, b"", "image/tiff"),
    (b"MM\0*", 0, b"", "image/tiff"),
    (b"ID3", 0, b"", "audio/mpeg"),
    (b"\xff\xfb", 0, b"", "audio/mpeg"),
    (b"\xff\xf3", 0, b"", "audio/mpeg"),
    (b"\xff\xf2", 0, b"", "audio/mpeg"),
    (b"\xff\xf1", 0, b"", "audio/aac"),
    (b"fLaC", 0, b"", "audio/flac"),
    (b"OggS", 0, b"", "audio/ogg"),
    (b"%PDF-", 0, b"", "application/pdf"),
)
#: Contents that browsers show without running code in them; most models read the pictures.
_SHOWN_PICTURES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp"})
_SHOWN_AUDIO = frozenset({"audio/wav", "audio/mpeg", "audio/mp4", "audio/aac", "audio/flac", "audio/ogg"})
#: The system's tables differ, and endpoints know only these names.
_TYPES_BY_SUFFIX = {
    ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp", ".avif": "image/avif", ".heic": "image/heic",
    ".wav": "audio/wav", ".mp3": "audio/mpeg", ".m4a": "audio/mp4", ".flac": "audio/flac", ".ogg": "audio/ogg",
    ".md": "text/markdown", ".csv": "text/csv", ".json": "application/json", ".yaml": "application/yaml",
}  # fmt: skip
_SAME_TYPES = {
    "image/jpg": "image/jpeg",
    "audio/mp3": "audio/mpeg",
    "audio/x-wav": "audio/wav",
    "audio/wave": "audio/wav",
    "audio/vnd.wave": "audio/wav",
    "audio/x-flac": "audio/flac",
    "audio/x-m4a": "audio/mp4",
}


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Attachment:
    """A picture, audio or a file; use `Image`, `Audio` or `File`.

    It is *unread* while it only names a path or a URL, *read* with its bytes, and a *reference* without them. A run reads it
    once and stores the bytes under their hash. Messages of a model call contain the bytes; records, events and traces contain
    references. Its text, as by `str`, is its name.

    Attributes:
        source: The path or the URL of an unread one, else "". Tasks fill in its variables, such as `{folder}/a.png`.
        name: File name, for prompts and providers.
        media_type: Such as `image/png`; "" until it is read, if it was not given.
        sha256: Hash of the content, in hexadecimal form; "" until it is read.
        size_bytes: Size of the content; -1 until it is read.
        origin: Hash of the path or the URL, by which a resumed run finds it in its record; "" for bytes.
        allow_private_hosts: Whether the URL may lead to private addresses.
        data: The content; None: it is unread, or a reference.
    """

    kind: ClassVar[AttachmentKind] = "file"

    source: str
    name: str
    media_type: str
    sha256: str
    size_bytes: int
    origin: str = field(compare=False)
    allow_private_hosts: bool = field(compare=False)
    data: bytes | None = field(compare=False)

    def __init__(
        self,
        source: str | os.PathLike[str] | bytes,
        *,
        name: str | None = None,
        media_type: str | None = None,
        allow_private_hosts: bool = False,
    ) -> None:
        """Make an attachment; a path or a URL is read later.

        Args:
            source: A path, a URL (`https:`, `http:` or `data:`), or bytes.
            name: File name; None: from the path or the URL.
            media_type: Such as `image/png`; None: from the content, else from the name.
            allow_private_hosts: Whether the URL may lead to private addresses, such as those of an intranet.

        Raises:
            ValidationError: the source is empty or of another type, or the media type is of another kind.
        """
        what = type(self).__name__
        if type(self) is Attachment:
            raise ValidationError("Attachment cannot be made; use Image, Audio or File")
        data: bytes | None = None
        where: object = source
        if isinstance(source, bytes | bytearray | memoryview):
            where, data = "", bytes(source)
        elif isinstance(source, os.PathLike):
            where = os.fspath(source)
        if not isinstance(where, str) or (not where.strip() and data is None):
            raise ValidationError(f"{what} must be made of a path, a URL or bytes, got: {where!r}")
        if name is not None and (not isinstance(name, str) or not name.strip()):
            raise ValidationError(f"{what} name must not be blank when set")
        if media_type is not None:
            media_type = _plain_type(media_type)
            if not _MEDIA_TYPE.fullmatch(media_type):
                raise ValidationError(f"{what} media_type must be such as 'image/png', got: {media_type!r}")
        if where[:5].lower() == "data:":
            named, data = _read_data_url(where, what)
            where, media_type = "", media_type or named
        _assign(
            self,
            source=where,
            name=_clean_name(name) if name else _name_of(where),
            media_type=media_type or "",
            origin=sha256(where.encode("utf-8", "replace")).hexdigest()[:_ORIGIN_DIGITS] if where else "",
            allow_private_hosts=allow_private_hosts is True,
        )
        self._accept(data)

    def _accept(self, data: bytes | None) -> None:
        """Check and set the content, its type and its hash."""
        if data is not None:
            if not data:
                raise ValidationError(f"{self.label} is empty")
            if len(data) > MOST_BYTES:
                raise ValidationError(
                    f"{self.label} is larger than {MOST_BYTES:,} bytes, the limit. Attach a smaller file"
                )
            _assign(self, media_type=self.media_type or _guess_type(data, self.name))
            if not self.name:
                import mimetypes  # few attachments need its tables

                suffix = mimetypes.guess_extension(self.media_type) or ""
                _assign(self, name=f"{self.kind}{suffix}")
        if self.media_type and not self._is_own_type(self.media_type):
            raise ValidationError(
                f"{self.label} is of type {self.media_type}, which is no {self.kind}. Use File for it, or set media_type"
            )
        hashed, size_bytes = ("", -1) if data is None else (sha256(data).hexdigest(), len(data))
        _assign(self, sha256=hashed, size_bytes=size_bytes, data=data)

    @classmethod
    def _is_own_type(cls, media_type: str) -> bool:
        return cls.kind == "file" or media_type.startswith(f"{cls.kind}/")

    def __repr__(self) -> str:
        size = f", {self.size_bytes:,} bytes" if self.size_bytes >= 0 else ""
        media_type = f", {self.media_type}" if self.media_type else ""
        return f"{type(self).__name__}({(self.source or self.name)!r}{media_type}{size})"

    def __str__(self) -> str:
        return self.name

    @property
    def label(self) -> str:
        """Its name in messages, such as `Image 'a.png'`."""
        source = self.source.partition("?")[0] if self.is_url else self.source  # a query may contain a key
        return f"{type(self).__name__} '{one_line(source or self.name or 'of bytes', _LONGEST_NAME)}'"

    @property
    def is_read(self) -> bool:
        """Whether its content and hash are known; also of a reference."""
        return bool(self.sha256)

    @property
    def is_url(self) -> bool:
        """Whether its source is a URL."""
        return self.source[:8].lower().startswith(("https://", "http://"))

    def with_source(self, source: str) -> Self:
        """Return an unread attachment with its variables filled in; a read one is unchanged."""
        if source == self.source or self.is_read:
            return self
        name = None if self.name == _name_of(self.source) else self.name
        return type(self)(
            source, name=name, media_type=self.media_type or None, allow_private_hosts=self.allow_private_hosts
        )

    def with_data(self, data: bytes, media_type: str = "") -> Self:
        """Return it with its content and without its source, or raise `ValidationError` if the content is refused.

        `media_type` is the type that a server reports. A given type, and a type that the content shows, have precedence.
        """
        reported = _plain_type(media_type)
        if reported == _UNKNOWN_TYPE or not _MEDIA_TYPE.fullmatch(reported) or not self._is_own_type(reported):
            reported = ""
        chosen = self.media_type or _signature_type(data) or reported
        read = type(self)(data, name=self.name or None, media_type=chosen or None)
        if self.sha256 and read.sha256 != self.sha256:
            raise ValidationError(f"{self.label} has another content than its hash")
        return _assign(read, origin=self.origin)

    def read(self) -> Self:
        """Return it with the content of its path; the content of a URL is read by runs.

        Raises:
            ValidationError: the path cannot be read, or its content is refused.
        """
        if self.data is not None:
            return self
        if self.is_url or not self.source:
            raise ValidationError(f"{self.label} has no content here; a run reads it")
        path = Path(self.source).expanduser()
        try:
            with open(path, "rb", opener=_open_file) as opened:
                data = opened.read(MOST_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ValidationError(f"{self.label} cannot be read: {reason}. Looked for: {path.absolute()}") from error
        return self.with_data(data)

    @staticmethod
    def of_file(path: str | os.PathLike[str], *, name: str | None = None) -> Attachment:
        """Return a reference to a file, of the kind of its content. It keeps the path, so `read` returns the same content.

        Raises:
            ValidationError: the path cannot be read, or its content is refused.
        """
        unread = File(path, name=name)
        read = unread.read()
        values = {each.name: getattr(read, each.name) for each in fields(read)}
        kind = KINDS.get(read.media_type.partition("/")[0], File)
        return _assign(object.__new__(kind), **{**values, "source": unread.source, "data": None})

    @staticmethod
    def of_bytes(data: bytes, *, name: str | None = None, media_type: str | None = None) -> Attachment:
        """Return an `Image`, an `Audio` or a `File`, by its type.

        Raises:
            ValidationError: the content is empty or too large, or the media type is invalid.
        """
        found = _plain_type(media_type) if media_type else _guess_type(data, name or "")
        return KINDS.get(found.partition("/")[0], File)(data, name=name, media_type=found)

    def as_reference(self) -> Self:
        """Return it without its content."""
        if self.data is None:
            return self
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return _assign(object.__new__(type(self)), **{**values, "data": None})

    def require_data(self) -> bytes:
        """Return the content, or raise `ValidationError`."""
        return cast("bytes", self.read().data)

    @property
    def is_text(self) -> bool:
        """Whether it is a file that models read as text, such as Markdown or CSV."""
        return self.kind == "file" and (self.media_type.startswith("text/") or self.media_type in _TEXT_TYPES)

    @property
    def estimated_tokens(self) -> int:
        """Estimate of its tokens in a request, for budgets and context windows."""
        if self.kind == "image":
            return _IMAGE_TOKENS
        size_bytes = max(0, self.size_bytes)
        if self.kind == "audio":
            return -(-size_bytes // _BYTES_OF_AUDIO_TOKEN)
        return estimate_tokens(size_bytes) if self.is_text else -(-size_bytes // _BYTES_OF_FILE_TOKEN)

    @property
    def data_url(self) -> str:
        """The content as a `data:` URL, or `ValidationError`."""
        read = self.read()
        return f"data:{read.media_type};base64,{base64.b64encode(read.require_data()).decode()}"

    def to_json(self) -> dict[str, object]:
        """Return the reference as JSON data; `from_json` reads it."""
        return {
            "kind": self.kind,
            "sha256": self.sha256,
            "media_type": self.media_type,
            "size_bytes": self.size_bytes,
            "name": self.name,
            **({"origin": self.origin} if self.origin else {}),
        }

    @staticmethod
    def from_json(data: Mapping[str, object]) -> Attachment:
        """Return the reference that `to_json` wrote, or raise a `ValueError`."""
        kind, name, media_type = data.get("kind"), data.get("name"), data.get("media_type")
        hashed, size_bytes, origin = (data.get(key) for key in ("sha256", "size_bytes", "origin"))
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"its kind is not one of {', '.join(KINDS)}")
        if not isinstance(hashed, str) or not _HASH.fullmatch(hashed):
            raise ValueError("its sha256 is not a hash")
        return _assign(
            object.__new__(KINDS[kind]),
            source="",
            name=_clean_name(name) if isinstance(name, str) and name else kind,
            media_type=media_type if isinstance(media_type, str) else _UNKNOWN_TYPE,
            sha256=hashed,
            size_bytes=size_bytes if isinstance(size_bytes, int) else -1,
            origin=origin if isinstance(origin, str) else "",
            allow_private_hosts=False,
            data=None,
        )


class Image(Attachment):
    """A picture, such as `Image("photo.png")`, `Image("https://example.com/a.png")` or `Image(data)`.

    Examples:
        >>> Image(b"GIF89a")
        Image('image.gif', image/gif, 6 bytes)
    """

    __slots__ = ()
    kind: ClassVar[AttachmentKind] = "image"


class Audio(Attachment):
    """Audio, such as `Audio("call.wav")`."""

    __slots__ = ()
    kind: ClassVar[AttachmentKind] = "audio"


class File(Attachment):
    """A document or another file, such as `File("report.pdf")`."""

    __slots__ = ()


KINDS: Mapping[str, type[Attachment]] = {"image": Image, "audio": Audio, "file": File}


def picture_in(data: bytes, *, name: str) -> Image | None:
    """Return a picture of a type that browsers and most models can read; None: the content is of another type."""
    media_type = _signature_type(data)
    return Image(data, name=name or None, media_type=media_type) if media_type in _SHOWN_PICTURES else None


def shown_type(data: bytes) -> str | None:
    """Return the media type of a content that a browser may show on a page, by its first bytes; None: it may not."""
    media_type = _signature_type(data)
    return media_type if media_type in _SHOWN_PICTURES | _SHOWN_AUDIO else None


def attachment_of(source: str | os.PathLike[str], *, name: str | None = None) -> Attachment:
    """Return an attachment of a path or a URL; the type of a data URL or the suffix of the name decides its kind."""
    where = os.fspath(source)
    media_type = (
        _read_data_url(where, "File")[0] if where[:5].lower() == "data:" else _named_type(name or _name_of(where))
    )
    return KINDS.get(media_type.partition("/")[0], File)(where, name=name)


def attachments_in(value: object) -> tuple[Attachment, ...]:
    """Return an attachment, or those in a mapping or a list, at any depth."""
    if isinstance(value, Attachment):
        return (value,)
    if isinstance(value, Mapping):
        value = tuple(cast("Mapping[object, object]", value).values())
    if not isinstance(value, list | tuple):
        return ()
    return tuple([found for each in cast("Sequence[object]", value) for found in attachments_in(each)])


def _assign(attachment: _A, **values: object) -> _A:
    for name, value in values.items():
        object.__setattr__(attachment, name, value)
    return attachment


def _open_file(path: str, flags: int) -> int:
    """Open without waiting for a writer of a pipe; only a file is accepted."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is not a file")
    return descriptor


def _plain_type(media_type: str) -> str:
    plain = str(media_type).partition(";")[0].strip().lower()
    return _SAME_TYPES.get(plain, plain)


def _signature_type(data: bytes) -> str:
    for first, at, second, media_type in _SIGNATURES:
        if data.startswith(first) and data.startswith(second, at):
            return media_type
    return ""


def _named_type(name: str) -> str:
    if found := _TYPES_BY_SUFFIX.get(Path(name).suffix.lower()):
        return found
    import mimetypes  # few attachments need its tables

    return _plain_type(mimetypes.guess_type(name)[0] or "")


def _guess_type(data: bytes, name: str) -> str:
    if found := _signature_type(data) or _named_type(name):
        return found
    try:
        data.decode()
    except UnicodeDecodeError:
        return _UNKNOWN_TYPE
    return "text/plain"


def _name_of(source: str) -> str:
    if source[:8].lower().startswith(("https://", "http://")):
        try:
            source = unquote(urlsplit(source).path)
        except ValueError:
            return ""
    return _clean_name(re.split(r"[/\\]", source)[-1])


def _clean_name(name: str) -> str:
    return str(one_line(name.strip(), _LONGEST_NAME))


def _read_data_url(url: str, what: str) -> tuple[str, bytes]:
    head, comma, body = url[5:].partition(",")
    media_type, *parameters = head.split(";")
    if not comma:
        raise ValidationError(f"{what}: a data URL needs a comma before its content")
    data = unquote_to_bytes(body)
    if "base64" in [each.strip().lower() for each in parameters]:
        try:
            data = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValidationError(f"{what}: the content of the data URL is not base64: {error}") from error
    return _plain_type(media_type) if _MEDIA_TYPE.fullmatch(_plain_type(media_type)) else "", data


def kinds_read(model: object) -> Collection[AttachmentKind] | None:
    """Return the kinds that the model declares by its attribute `reads`; None: its endpoint decides."""
    return cast("Collection[AttachmentKind] | None", getattr(behind_limits(model), "reads", ()))


def behind_limits(model: object) -> object:
    while (inner := getattr(model, "delegate", None)) is not None:  # a rate-limited model
        model = inner
    return model
