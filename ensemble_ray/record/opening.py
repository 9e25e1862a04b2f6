"""Which store an address names. Package: record; composition only, so that stores need not know each other."""

from __future__ import annotations

from pathlib import Path

from ensemble_ray.errors import ValidationError
from ensemble_ray.record.stores import RunStore, StoreAddress


def store_at(address: StoreAddress) -> RunStore:
    """Return the store of an address.

    Raises:
        ValidationError: no store speaks that URL, or its extra is not installed.
    """
    if not address.url:
        from ensemble_ray.record.sqlite.store import SqliteStore

        return SqliteStore(Path(address.home))
    if address.url.startswith(("postgresql://", "postgres://")):
        from ensemble_ray.record.postgres.store import PostgresStore

        return PostgresStore(address.url)
    # Of a text without a scheme nothing is repeated: it may be a password as well.
    scheme, colon, _ = address.url.partition("://")
    named = f" '{scheme}://...'" if colon else ""
    raise ValidationError(f"Unknown store{named}: use a postgresql:// URL, or none for files in ENSEMBLE_RAY_HOME")
