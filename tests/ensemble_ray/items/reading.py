"""Reads sources to their ends, for the tests of this folder."""

from ensemble_ray.items.pulling import ItemEntry, ItemReader
from ensemble_ray.items.sources import source_of

__all__ = ["entries_of", "read_all"]


async def entries_of(items: object, count: int = 3) -> list[ItemEntry]:
    """All entries of a source, pulled by so many."""
    return await read_all(source_of(items).open(), count)


async def read_all(reader: ItemReader, count: int = 3) -> list[ItemEntry]:
    """All entries that are left; the reader is closed."""
    found: list[ItemEntry] = []
    try:
        while True:
            pulled = await reader.next(count)
            assert len(pulled.items) <= count
            assert pulled.items or pulled.is_exhausted
            found.extend(pulled.items)
            if pulled.is_exhausted:
                return found
    finally:
        await reader.close()
