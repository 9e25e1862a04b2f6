"""Items of `.parquet` files."""

import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from ensemble_ray import ValidationError
from ensemble_ray.items.results import ResultsFile
from ensemble_ray.items.sources import source_of
from tests.ensemble_ray.items.reading import entries_of


def _file(folder: Path, count: int) -> Path:
    path = folder / "a.parquet"
    table = pa.table({"n": list(range(count)), "text": [str(n) for n in range(count)]})
    parquet.write_table(table, path, row_group_size=100)
    return path


async def test_rows_are_dicts_when_a_parquet_file_is_read(tmp_path: Path) -> None:
    """S-MR-120: over its groups of rows, in order; how many there are is known."""
    path = _file(tmp_path, 700)
    assert source_of(path).count == 700
    assert await entries_of(path, 150) == [(n, {"n": n, "text": str(n)}) for n in range(700)]


async def test_file_is_found_empty_when_it_has_no_rows(tmp_path: Path) -> None:
    """S-MR-122: only when it is pulled."""
    assert await entries_of(_file(tmp_path, 0)) == []


def test_file_is_refused_when_it_is_no_parquet(tmp_path: Path) -> None:
    """S-MR-120: at construction, with the reason."""
    path = tmp_path / "a.parquet"
    path.write_bytes(b"no such thing")
    with pytest.raises(ValidationError, match=r"items file '.*a.parquet' is no parquet file: "):
        source_of(path)


async def test_what_installs_the_reader_is_said_when_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-MR-120, S-MR-130: before any item is pulled, and before any result is written."""
    path = _file(tmp_path, 1)
    for name in [each for each in sys.modules if each.partition(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    told = r"needs pyarrow, which is not installed: pip install 'ensemble-ray\[parquet\]'"
    with pytest.raises(ValidationError, match=told):
        source_of(path)
    with pytest.raises(ValidationError, match=told):
        await ResultsFile.open(tmp_path / "out.parquet", is_resumed=False)
