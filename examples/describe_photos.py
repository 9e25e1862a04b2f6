"""Describe each picture of a folder. A picture that cannot be read is left out with the reason.

python examples/describe_photos.py [LLM] [FOLDER or 'FOLDER/*.jpg']    without a folder it draws pictures of its own
"""

from __future__ import annotations

import struct
import sys
import tempfile
import zlib
from pathlib import Path

from ensemble_ray import Agent, EnsembleOutput, Files, Image, MapEnsemble, Task

COLOURS = {"sea.png": (20, 90, 200), "sand.png": (230, 200, 120), "sun/evening.png": (220, 60, 30)}


def draw(folder: Path) -> None:
    """Write squares of one colour, and a file without content."""
    for name, colour in COLOURS.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png(colour))
    (folder / "broken.png").touch()


def png(colour: tuple[int, int, int], side: int = 64) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = (b"\0" + bytes(colour) * side) * side
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def describe(folder: str, llm: str) -> EnsembleOutput:
    viewer = Agent(role="Viewer", goal="Say what a picture shows, in plain words", llm=llm)

    def look(photo: Image) -> Task:
        return Task(
            description=f"Describe the picture '{photo.name}'",
            expected_output="One sentence",
            agent=viewer,
            attachments=[photo],
        )

    photos = MapEnsemble(items=Files(folder), map_task=look, on_item_error="collect", max_concurrency=8)
    begun = photos.start()
    for result in begun.items():
        if result.output is not None:
            print(f"{result.item.name}: {result.output.raw}")
    for failed in begun.result().failed_items:
        print(f"{failed.item.name}: left out, {failed.message}")
    return begun.result()


def main(llm: str = "openai:gpt-4o-mini", folder: str = "") -> EnsembleOutput:
    if folder:
        return describe(folder, llm)
    with tempfile.TemporaryDirectory() as own:
        draw(Path(own))
        return describe(own, llm)


if __name__ == "__main__":
    main(*sys.argv[1:3])
