"""How a team file names a PostgreSQL database (S-MEM-145). Package: loader.

Never: a password in a file, or in a message.
"""

from __future__ import annotations

from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

from ensemble_ray.errors import ValidationError
from ensemble_ray.loader.field_types import Text
from ensemble_ray.loader.reading import Reading, refuse
from ensemble_ray.loader.section import FileSection, key

__all__ = ["DatabaseKeys", "url_of"]

_URL_WAY = "name the variable that holds the URL with url_env, or leave the password to PGPASSWORD or ~/.pgpass"


class DatabaseKeys(FileSection):
    """A database; sections add what is theirs."""

    misplaced: ClassVar = {"dsn": "the key is 'url', or 'url_env' for a URL with a password"}
    url: Text = key("The database, `postgresql://HOST:PORT/DATABASE`; no password here.")
    url_env: Text = key("Environment variable that holds the URL, in place of `url`.")


def url_of(reading: Reading, section: DatabaseKeys) -> str:
    """Return the URL of a database; one with a password comes from the environment.

    Raises:
        ValidationError: there is none, or a password is in the file.
    """
    values = section.values()
    if ("url" in values) == ("url_env" in values):
        raise ValidationError("must have one of the keys 'url' and 'url_env'")
    if (variable := values.get("url_env")) is not None:
        try:
            url = reading.read_key(variable)
        except ValidationError as error:
            raise refuse(str(error), "postgres", "url_env") from None
        return url if reading.needs_keys else f"postgresql:///{variable}"
    url = values["url"]
    parts = urlsplit(url)
    if parts.password is not None or "password" in parse_qs(parts.query):
        raise refuse(f"a password does not belong in a file: {_URL_WAY}", "postgres", "url")
    return str(url)
