"""Attachments: of what they are made, their types and limits, and what texts and pickles of them contain."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from ensemble_ray import Attachment, Audio, ChatMessage, File, Image, Task, ValidationError
from ensemble_ray.values import attachments
from ensemble_ray.values.attachments import attachment_of

PNG = b"\x89PNG\r\n\x1a\n..."
WAV = b"RIFF\0\0\0\0WAVE..."


def test_attachment_is_unread_when_it_names_a_path_or_a_url() -> None:
    """S-ATT-1, S-ATT-4: no file is opened, and the name is known."""
    for made, name in (
        (Image("photos/a.png"), "a.png"),
        (Image(Path("photos") / "a.png"), "a.png"),
        (Audio("https://example.com/x/call%201.wav?key=1#t"), "call 1.wav"),
        (File("{folder}/report.pdf"), "report.pdf"),
    ):
        assert (made.is_read, made.data, made.size_bytes, str(made)) == (False, None, -1, name)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Image(""), "Image must be made of a path, a URL or bytes, got: ''"),
        (lambda: Audio(7), "Audio must be made of a path, a URL or bytes, got: 7"),
        (lambda: Attachment("a.png"), "Attachment cannot be made; use Image, Audio or File"),
        (lambda: Image(PNG, name=" "), "Image name must not be blank when set"),
        (lambda: Image(PNG, media_type="png"), "Image media_type must be such as 'image/png', got: 'png'"),
        (lambda: Image(b"", name="a.png"), "Image 'a.png' is empty"),
        (lambda: Image(b"hello", name="a"), "Image 'a' is of type text/plain, which is no image"),
        (lambda: Audio(PNG, name="a.wav"), "Audio 'a.wav' is of type image/png, which is no audio"),
        (lambda: Image("data:image/png;base64"), "Image: a data URL needs a comma before its content"),
        (lambda: Image("data:image/png;base64,?"), "Image: the content of the data URL is not base64"),
        (lambda: Image("no.png").read(), "Image 'no.png' cannot be read: No such file or directory. Looked for: /"),
        (lambda: Image("/tmp").read(), "Image '/tmp' cannot be read: "),  # noqa: S108  a directory
        (lambda: Image("https://x.y/a.png?key=1").read(), "Image 'https://x.y/a.png' has no content here"),
        (lambda: Task("Look", attachments=[PNG]), "Task attachments[0] must be an Image, an Audio or a File"),
        (
            lambda: Task("Look", history=[ChatMessage("user", "a", attachments=(Image(PNG),))]),
            "Task history element at index 0 must have no attachments",
        ),
    ],
)
def test_error_names_what_is_wrong(make: Callable[[], object], text: str) -> None:
    """S-ATT-1, S-ATT-2, S-ATT-3, S-ATT-5, S-ATT-6."""
    with pytest.raises(ValidationError) as refused:
        make()
    assert str(refused.value).startswith(text)


@pytest.mark.parametrize(
    ("made", "media_type"),
    [
        (File(PNG, name="a.txt"), "image/png"),
        (File(PNG, name="a.txt", media_type="text/x-own; charset=utf-8"), "text/x-own"),
        (File(b"a,b", name="a.csv"), "text/csv"),
        (File(b"abc"), "text/plain"),
        (File(b"\xff\0"), "application/octet-stream"),
        (File(b"%PDF-1.7"), "application/pdf"),
        (Image(b"\xff\xd8\xff\xe0"), "image/jpeg"),
        (Image(b"RIFF\0\0\0\0WEBP"), "image/webp"),
        (Audio(WAV), "audio/wav"),
        (Audio(b"ID3..."), "audio/mpeg"),
        (Audio(b"\0\1", name="a.mp3"), "audio/mpeg"),
        (Audio(b"\0\1", media_type="audio/mp3"), "audio/mpeg"),
        (File("data:,hello%20you"), "text/plain"),
        (File("data:application/json;base64,e30="), "application/json"),
    ],
)
def test_media_type_is_told_by_argument_content_or_name(made: File, media_type: str) -> None:
    """S-ATT-2."""
    assert made.media_type == media_type


def test_reported_type_counts_when_the_content_does_not_tell_and_it_is_of_the_kind() -> None:
    """S-ATT-2: servers often report a general type."""
    unread = Image("https://example.com/photo")
    assert unread.with_data(b"\0\1", "image/x-own; q=1").media_type == "image/x-own"
    assert unread.with_data(PNG, "image/x-own").media_type == "image/png"
    assert File("https://example.com/a.csv").with_data(b"a,b", "application/octet-stream").media_type == "text/csv"
    assert Image("https://example.com/a.png").with_data(b"\0", "text/html").media_type == "image/png"


def test_content_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """S-ATT-3: of a file only so much is read."""
    monkeypatch.setattr(attachments, "MOST_BYTES", 10)
    (tmp_path / "a.bin").write_bytes(b"x" * 11)
    for make in (lambda: File(b"x" * 11, name="a.bin"), File(tmp_path / "a.bin").read):
        with pytest.raises(
            ValidationError, match=r"a\.bin' is larger than 10 bytes, the limit\. Attach a smaller file"
        ):
            make()
    assert File(b"x" * 10).size_bytes == 10


def test_pipe_is_refused_without_a_wait(tmp_path: Path) -> None:
    """S-ATT-3: a pipe without a writer would block for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValidationError, match="cannot be read: it is not a file"):
        File(tmp_path / "pipe").read()


def test_read_attachment_equals_its_reference(tmp_path: Path) -> None:
    """S-ATT-4: by content, type and name, wherever it came from."""
    (tmp_path / "a.png").write_bytes(PNG)
    read = Image(tmp_path / "a.png").read()
    reference = read.as_reference()
    assert (read.data, reference.data) == (PNG, None)
    assert read == reference == Image(PNG, name="a.png") == Attachment.from_json(reference.to_json())
    assert len({read, reference, Image(PNG, name="a.png")}) == 1
    assert read != Image(PNG, name="b.png")
    assert read != File(PNG, name="a.png")
    assert Image("x/a.png") != Image("y/a.png")
    with pytest.raises(ValidationError, match="another content than its hash"):
        reference.with_data(WAV)


def test_texts_of_an_attachment_never_contain_its_content() -> None:
    """S-ATT-4: `to_json` is the reference."""
    made = File(b"secret", name="a.txt")
    assert repr(made) == "File('a.txt', text/plain, 6 bytes)"
    assert str(made) == "a.txt"
    assert "secret" not in repr(ChatMessage("user", attachments=(made.as_reference(),)))
    assert made.to_json() == {
        "kind": "file",
        "sha256": "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b",
        "media_type": "text/plain",
        "size_bytes": 6,
        "name": "a.txt",
    }


@pytest.mark.parametrize("made", [Image("a.png"), Image(PNG), Image(PNG).as_reference()])
def test_pickle_keeps_what_it_has(made: Image) -> None:
    """S-ATT-4."""
    again = pickle.loads(pickle.dumps(made))  # noqa: S301  made here
    assert (type(again), again, again.data, again.source) == (Image, made, made.data, made.source)
    assert len(pickle.dumps(Image(PNG * 10_000).as_reference())) < 1_000


def test_data_url_is_read_back() -> None:
    """S-ATT-1."""
    made = Image(PNG, name="a.png")
    assert made.data_url == f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert Image(made.data_url, name="a.png") == made


@pytest.mark.parametrize(
    ("source", "kind"),
    [("a/b.PNG", Image), ("https://x.y/b.mp3?x", Audio), ("b.pdf", File), ("b", File), ("data:image/gif,GIF8", Image)],
)
def test_suffix_decides_the_kind(source: str, kind: type[Attachment]) -> None:
    """S-ATT-13: of a plain path or URL."""
    assert type(attachment_of(source)) is kind


@pytest.mark.parametrize(
    ("made", "tokens"),
    [
        (Image(PNG), 1_000),
        (Audio(WAV + b"\0" * 5_000), 6),
        (File(b"four" * 25), 25),
        (File(b"%PDF-" + b"\0" * 495), 10),
    ],
)
def test_tokens_are_estimated_by_kind_and_size(made: File, tokens: int) -> None:
    """S-ATT-40."""
    assert made.estimated_tokens == made.as_reference().estimated_tokens == tokens
