"""Golden records as text, and back. In: a run's record, in SQLite or PostgreSQL. Out: lines of JSON, and the record again.

Plain SQL on the tables that `docs/record-format.md` describes, and nothing of the library: it may have changed since.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    import psycopg

__all__ = ["Record", "read_postgres", "read_sqlite", "restore_postgres", "restore_sqlite"]

_HERE = Path(__file__).parent
_NOTE_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Everything that is recorded of a run."""

    run_id: str
    #: `PRAGMA user_version`, or the version of the tables
    version: int
    created_at: str
    origin: str
    state: str
    #: the three positions in `record.count`; none in a database
    counts: Sequence[int]
    #: newest epochs by instance
    epochs: Mapping[str, int]
    #: long texts by hash; in hexadecimal what is no text
    bodies: Mapping[str, str]
    #: seq, kind, name, instance, at, epoch, data
    facts: Sequence[tuple[int, str, str, str, float, int, Any]]
    #: files that the run writes, by name
    files: Mapping[str, str]

    def to_text(self) -> str:
        """Return it as lines: the run, its long texts, its facts."""
        first = {
            "run": self.run_id,
            "version": self.version,
            "created_at": self.created_at,
            "origin": self.origin,
            "state": self.state,
            "counts": self.counts,
            "epochs": self.epochs,
            "files": self.files,
        }
        lines = [first, *({"sha256": each, "body": text} for each, text in self.bodies.items()), *self.facts]
        return "".join(f"{json.dumps(each, separators=(',', ':'))}\n" for each in lines)

    @classmethod
    def of_text(cls, text: str) -> Record:
        """Read the lines."""
        lines = [json.loads(line) for line in text.splitlines()]
        first = lines[0]
        return cls(
            run_id=first["run"],
            version=first["version"],
            created_at=first["created_at"],
            origin=first["origin"],
            state=first["state"],
            counts=first["counts"],
            epochs=first["epochs"],
            files=first["files"],
            bodies={each["sha256"]: each["body"] for each in lines[1:] if isinstance(each, dict)},
            facts=[tuple(each) for each in lines[1:] if isinstance(each, list)],
        )


def read_sqlite(home: Path, run_id: str, files: Path | None = None) -> Record:
    """Read the record of a run that nobody owns."""
    folder = home / "runs" / run_id
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    with contextlib.closing(sqlite3.connect(folder / "record.sqlite")) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        facts = connection.execute("SELECT seq, kind, name, instance, at, epoch, data FROM facts ORDER BY seq")
        rows = [(*row[:6], json.loads(row[6])) for row in facts]
        bodies = dict(connection.execute("SELECT sha256, body FROM bodies ORDER BY sha256").fetchall())
        epochs = dict(connection.execute("SELECT instance, epoch FROM epochs ORDER BY instance").fetchall())
    notes = (folder / "record.count").read_bytes()
    counts = [int(notes[place : place + 12].strip(b"\0 ") or 0) for place in range(0, 3 * _NOTE_BYTES, _NOTE_BYTES)]
    return Record(
        run_id=run_id,
        version=version,
        created_at=meta["created_at"],
        origin=meta["origin"],
        state=meta["state"],
        counts=counts,
        epochs=epochs,
        bodies=bodies,
        facts=rows,
        files=_files_in(files),
    )


def restore_sqlite(record: Record, home: Path) -> None:
    """Write the record into a home, as this machine would have recorded it."""
    folder = home / "runs" / record.run_id
    folder.mkdir(parents=True, mode=0o700)
    meta = {
        "format": record.version,
        "run": record.run_id,
        "created_at": record.created_at,
        "origin": record.origin,
        "state": record.state,
    }
    (folder / "meta.json").write_text(f"{json.dumps(meta, indent=2)}\n", encoding="utf-8")
    (folder / "owner.lock").touch(mode=0o600)
    (folder / "record.count").write_bytes(b"".join(map(_note, record.counts)))
    with contextlib.closing(sqlite3.connect(folder / "record.sqlite", isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous=OFF")
        connection.executescript((_HERE / f"sqlite-{record.version}.sql").read_text(encoding="utf-8"))
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("BEGIN")
        rows = ((*fact[:6], json.dumps(fact[6], ensure_ascii=False)) for fact in record.facts)
        connection.executemany("INSERT INTO facts VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        connection.execute("DELETE FROM epochs")  # its trigger noted some; they are not in the order of the facts
        connection.executemany("INSERT INTO epochs VALUES (?, ?)", record.epochs.items())
        connection.executemany("INSERT INTO bodies VALUES (?, ?)", record.bodies.items())
        connection.execute("COMMIT")


def _note(seq: int) -> bytes:
    """Return a line of `record.count`: a position, this machine's boot, a checksum of both."""
    if not seq:
        return b"\0" * _NOTE_BYTES
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = b"%-12d %-36s " % (seq, boot.read_bytes().strip() if boot.exists() else b"")
    return b"%s%08x\n" % (text.ljust(_NOTE_BYTES - 9), crc32(text))


def read_postgres(connection: psycopg.Connection[Any], run_id: str, files: Path | None = None) -> Record:
    """Read the record of a run in a database."""
    version = connection.execute("SELECT max(version) FROM ensemble_ray.format").fetchone()
    of_run = connection.execute(
        "SELECT created_at, origin, state, epoch FROM ensemble_ray.runs WHERE run_id = %s", [run_id]
    ).fetchone()
    assert version is not None
    assert of_run is not None
    facts = connection.execute(
        "SELECT seq, kind, name, instance, at, epoch, data FROM ensemble_ray.facts WHERE run_id = %s ORDER BY seq",
        [run_id],
    )
    rows = [(*row[:6], json.loads(row[6])) for row in facts]
    bodies = connection.execute(
        "SELECT encode(sha256, 'hex'), convert_from(body, 'UTF8') FROM ensemble_ray.bodies WHERE run_id = %s ORDER BY 1",
        [run_id],
    ).fetchall()
    epochs = connection.execute(
        "SELECT instance, epoch FROM ensemble_ray.epochs WHERE run_id = %s ORDER BY 1", [run_id]
    ).fetchall()
    return Record(
        run_id=run_id,
        version=version[0],
        created_at=of_run[0].isoformat(),
        origin=of_run[1],
        state=of_run[2],
        counts=(),
        epochs=dict(epochs) | ({"run": of_run[3]} if of_run[3] else {}),
        bodies=dict(bodies),
        facts=rows,
        files=_files_in(files),
    )


def restore_postgres(record: Record, connection: psycopg.Connection[Any]) -> None:
    """Write the record into a database without tables."""
    connection.execute((_HERE / "postgres-1.sql").read_bytes())
    with connection.transaction():
        connection.execute(
            "INSERT INTO ensemble_ray.runs (run_id, begun, created_at, origin, state, epoch)"
            " VALUES (%s, %s, %s, %s, %s, %s)",
            [record.run_id, uuid.uuid4(), record.created_at, record.origin, record.state, record.epochs.get("run", 0)],
        )
        for fact in record.facts:
            connection.execute(
                "INSERT INTO ensemble_ray.facts VALUES (%s, %s, %s, %s, %s, %s, %s, %s)",
                [record.run_id, *fact[:6], json.dumps(fact[6], ensure_ascii=False)],
            )
        for name, epoch in record.epochs.items():
            if name != "run":
                connection.execute("INSERT INTO ensemble_ray.epochs VALUES (%s, %s, %s)", [record.run_id, name, epoch])
        for digest, body in record.bodies.items():
            connection.execute(
                "INSERT INTO ensemble_ray.bodies VALUES (%s, decode(%s, 'hex'), %s)",
                [record.run_id, digest, body.encode()],
            )


def _files_in(folder: Path | None) -> dict[str, str]:
    if folder is None:
        return {}
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir()) if path.is_file()}
