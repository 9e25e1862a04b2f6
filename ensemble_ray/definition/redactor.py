"""`Redactor`: which values of a run's texts are replaced by placeholders, and the key of a run that can be reversed."""

from __future__ import annotations

import base64
import hmac
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

from pydantic import BeforeValidator, SkipValidation, Strict

from ensemble_ray.definition import fields
from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.text.redaction import NEEDS, PATTERNS, Redaction
from ensemble_ray.values.value import Accepts, Value, to_tuple

REDACTION_KEY = "ENSEMBLE_RAY_REDACTION_KEY"
_KEY_FILE = "redaction.key"  # of runs that cannot be reversed, in the home directory
_SHORTEST_KEY = 32  # characters
_NAME, _VARIABLE, _REGION = re.compile(r"[a-z][a-z0-9_]{0,39}"), re.compile(r"[A-Za-z_]\w*"), re.compile(r"[A-Z]{2}")
_NEW_KEY = "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
_Pattern: TypeAlias = str | Callable[[str], Iterable[tuple[int, int]]]
if TYPE_CHECKING:
    _Custom: TypeAlias = Accepts[Mapping[str, _Pattern], Mapping[str, _Pattern] | None]
    _Patterns: TypeAlias = Accepts[Sequence[str], str | Sequence[str]]
    _Tools: TypeAlias = Sequence[str] | None
else:
    _Custom = Annotated[fields.CopiedMapping[str, Any], SkipValidation]
    _Patterns = Annotated[tuple[str, ...], BeforeValidator(to_tuple)]
    _Tools = Annotated[tuple[str, ...], BeforeValidator(to_tuple)] | None


class Redactor(Value):
    """Replaces personal data and keys by placeholders, before they reach prompts, records, traces, telemetry and exports.

    The same text has the same placeholder in one run, such as `[EMAIL_1f3a9c2b7d40]`, and another one in the next run.

    Attributes:
        patterns: The library's patterns: `"email"`, `"phone"`, `"card"` (numbers with a right check digit), `"iban"` (with a
            right checksum) and `"key"` (API keys of well-known forms, bearer tokens, private key blocks).
        custom: More patterns by name, in lower case. A pattern is a regular expression, or a function that returns
            the `(start, end)` of each value in a text. An expression with a group redacts its first group alone.
        reversible: Whether the record has the values, encrypted with the key. Tools then receive the values.
        region: Region of phone numbers without a country code, such as `"DE"`; None: only numbers with a country code.
        key: Name of the environment variable with the key, a random text of at least 32 characters. A run that
            cannot be reversed needs no key.
        tools: Names of the tools that receive values in a reversible run; None: all tools.
        reveal_roles: Roles of keys whose holders may see the values of a reversible run in Studio and at an endpoint, as
            those with the right `admin` may.

    Raises:
        ValidationError: a pattern, a region or a name is unknown or invalid, or a package is missing.

    Examples:
        >>> Redactor(patterns="email").patterns
        ('email',)
    """

    patterns: _Patterns = fields.initially(PATTERNS)
    custom: _Custom = fields.initially({})
    reversible: Annotated[bool, Strict()] = False
    region: fields.StrictText | None = None
    key: fields.StrictText = REDACTION_KEY
    tools: _Tools = None
    reveal_roles: _Patterns = fields.initially(())

    @fields.checks_arguments
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> None:
        patterns = _names(arguments.get("patterns", PATTERNS), "patterns")
        custom: object = arguments.get("custom")
        if custom is not None and not isinstance(custom, Mapping):
            raise ValidationError(f"Redactor custom must be a mapping of names to patterns, got: {custom!r}")
        for name, pattern in cast("Mapping[object, object]", custom or {}).items():
            _check_custom(name, pattern)
        if arguments.get("tools") is not None:
            _names(arguments["tools"], "tools")
        if _names(arguments.get("reveal_roles", ()), "reveal_roles") and not arguments.get("reversible"):
            raise ValidationError("Redactor reveal_roles needs reversible=True: other runs have no values to reveal")
        if unknown := [each for each in patterns if each not in PATTERNS]:
            raise ValidationError(f"Redactor patterns: unknown pattern '{unknown[0]}'. Known: {', '.join(PATTERNS)}")
        if not patterns and not custom:
            raise ValidationError("Redactor has no pattern: give patterns, or custom ones")
        region = arguments.get("region")
        if region is not None and not _is_text(region, _REGION):
            raise ValidationError(f"Redactor region must be two capital letters, such as 'DE', got: {region!r}")
        if not _is_text(arguments.get("key", REDACTION_KEY), _VARIABLE):  # it may be a key, so it is not shown
            raise ValidationError("Redactor key must be the name of an environment variable, and never the key itself")
        _check_packages(patterns, region)

    def begin(self, run_id: str, header: Mapping[str, object] | None = None, *, is_recorded: bool = True) -> Redaction:
        """Return the redactor of one run; `header` is what an earlier process of the run recorded.

        Raises:
            ValidationError: the key is missing, too short, or not the one that the run began with.
        """
        salt = run_id if header is None else str(header.get("salt", ""))
        if self.reversible and not is_recorded:
            raise ValidationError(
                "Redactor reversible=True needs a record, which has the values: leave out durability='off', or reversible"
            )
        main = self._main_key(is_recorded=is_recorded)
        redaction = Redaction(
            secret=_derived(main, "secret", salt),
            salt=salt,
            patterns=self.patterns,
            expressions={name: each for name, each in self.custom.items() if isinstance(each, str)},
            region=self.region,
            callables={name: each for name, each in self.custom.items() if not isinstance(each, str)},
            seal=base64.urlsafe_b64encode(_derived(main, "values", salt)) if self.reversible else None,
            tools=self.tools,
            reveal_roles=self.reveal_roles,
            key="" if self.key == REDACTION_KEY else self.key,
        )
        if header is not None:
            _check_secret(redaction, header, self.key)
            learn_values(redaction, header)
        return redaction

    def _main_key(self, *, is_recorded: bool) -> bytes:
        if (key := _key_of(self.key)) is not None:
            return key
        if self.reversible or self.key != REDACTION_KEY:
            raise ValidationError(_missing(self.key, "Redactor"))
        return _own_key() if is_recorded else secrets.token_bytes(32)


def _check_packages(patterns: Sequence[str], region: str | None) -> None:
    from importlib.util import find_spec

    missing = [name for name in patterns if name in NEEDS and find_spec(NEEDS[name]) is None]
    if missing:
        listed = ", ".join(f"'{name}'" for name in missing)
        raise ValidationError(
            f"Redactor patterns {listed} need packages that are not installed: pip install 'ensemble-ray[redaction]', "
            "or leave these patterns out"
        )
    if "phone" in patterns and region is not None:
        from phonenumbers import SUPPORTED_REGIONS

        if region not in SUPPORTED_REGIONS:
            raise ValidationError(f"Redactor region: '{region}' has no phone numbers. Examples: DE, FR, US")


def describe_redaction(redaction: Redaction) -> Mapping[str, object]:
    """Return what the first fact of a run contains of its redactor: no key, and no value in plain text."""
    data: dict[str, object] = {"salt": redaction.salt, "check": redaction.check, "patterns": list(redaction.patterns)}
    if redaction.expressions:
        data["custom"] = redaction.expressions
    if redaction.region is not None:
        data["region"] = redaction.region
    if redaction.is_reversible:
        data |= {"reversible": True, "values": redaction.sealed_values()}
    if redaction.reveal_roles:
        data["reveal_roles"] = list(redaction.reveal_roles)
    if redaction.key:
        data["key"] = redaction.key
    return data


def recorded_redaction(header: Mapping[str, object], *, key: str | None = None) -> Redaction:
    """Return the redactor of a recorded run, without the functions of its program. `key` is a variable; None: the recorded one.

    Raises:
        ValidationError: the key is missing, or not the one that the run began with.
    """
    is_reversible, key = header.get("reversible") is True, key or str(header.get("key") or REDACTION_KEY)
    main, salt = _key_of(key), str(header.get("salt", ""))
    if main is None and is_reversible:
        raise ValidationError(
            f"This run needs a key in the environment variable {key}, which is not set here. Set it for this process, to the "
            "key that the run began with"
        )
    main = _own_key() if main is None else main
    custom = cast("Mapping[str, str]", header.get("custom") or {})
    region = header.get("region")
    redaction = Redaction(
        secret=_derived(main, "secret", salt),
        salt=salt,
        patterns=[each for each in cast("Sequence[str]", header.get("patterns") or ()) if each in PATTERNS],
        expressions=custom,
        region=region if isinstance(region, str) else None,
        seal=base64.urlsafe_b64encode(_derived(main, "values", salt)) if is_reversible else None,
        most_values=None,
    )
    _check_secret(redaction, header, key)
    learn_values(redaction, header)
    return redaction


def learn_values(redaction: Redaction, header: Mapping[str, object]) -> None:
    """Add the encrypted values of a first fact."""
    if redaction.is_reversible:
        for name, token in cast("Mapping[str, str]", header.get("values") or {}).items():
            learn_value(redaction, name, token)


def learn_value(redaction: Redaction, name: str, token: str) -> None:
    """Add an encrypted value of the record; a `ValidationError`: the key is wrong, or the value is damaged."""
    try:
        redaction.learn(name, token)
    except ValueError as error:
        raise ValidationError(f"Redaction: {message_of(error)}") from None


def check_redactor(run_id: str, redactor: Redactor | None, header: Mapping[str, object] | None) -> None:
    """Refuse to continue a run with a redactor without one, and the reverse."""
    if (redactor is None) is (header is None):
        return
    had, has = ("a", "no") if header is not None else ("no", "a")
    raise ValidationError(
        f"Run '{run_id}' began with {had} redactor, and this definition has {has} redactor. Use the definition with "
        f"{had} redactor, or start a new run"
    )


def _check_secret(redaction: Redaction, header: Mapping[str, object], key: str) -> None:
    if redaction.check == header.get("check"):
        return
    if _key_of(key) is None:
        raise ValidationError(
            f"The run was redacted with another key: with that of {key}, which is not set here, or with the key file of "
            f"the machine where it began ({_key_file()} here). Set {key} to the key that it began with"
        )
    raise ValidationError(
        f"The key in {key} is not the one that the run was redacted with. Set {key} to the key that it began with"
    )


def _key_of(variable: str) -> bytes | None:
    value = os.environ.get(variable, "").strip()
    if not value:
        return None
    if len(value) < _SHORTEST_KEY:
        raise ValidationError(
            f"{variable} must have at least {_SHORTEST_KEY} characters. A new key is made by: {_NEW_KEY}"
        )
    return value.encode()


def _missing(variable: str, what: str) -> str:
    return (
        f"{what} needs a key in the environment variable {variable}, which is not set: a random text of at least "
        f"{_SHORTEST_KEY} characters, the same one for each process that starts, resumes or reveals the run. A new key "
        f"is made by: {_NEW_KEY}"
    )


def _own_key() -> bytes:
    """Return the key of this user on this machine."""
    from ensemble_ray.process.private_files import create_private_file, read_private_file

    path = _key_file()
    create_private_file(path, secrets.token_bytes(32))
    return read_private_file(path)


def _key_file() -> Path:
    from ensemble_ray.process.config import home_directory  # slow to import, and few teams have a redactor

    return home_directory() / _KEY_FILE


def _derived(main: bytes, purpose: str, salt: str) -> bytes:
    return hmac.digest(main, f"ensemble_ray redaction {purpose}\0{salt}".encode(), "sha256")


def _names(value: object, what: str) -> tuple[str, ...]:
    given: object = (value,) if isinstance(value, str) else value
    if not isinstance(given, Sequence) or not all(isinstance(each, str) for each in cast("Sequence[object]", given)):
        raise ValidationError(f"Redactor {what} must be names, got: {value!r}")
    return tuple(dict.fromkeys(cast("Sequence[str]", given)))


def _is_text(value: object, form: re.Pattern[str]) -> bool:
    return isinstance(value, str) and form.fullmatch(value) is not None


def _check_custom(name: object, pattern: object) -> None:
    if not _is_text(name, _NAME):
        raise ValidationError(
            f"Redactor custom: the name {name!r} must have lower-case letters, digits and '_', and begin with a letter"
        )
    if name in PATTERNS:
        raise ValidationError(f"Redactor custom: '{name}' is the name of a pattern of the library; choose another name")
    if isinstance(pattern, str):
        try:
            expressed = re.compile(pattern)
        except re.error as error:
            raise ValidationError(f"Redactor custom '{name}': invalid regular expression: {error}") from None
        if expressed.fullmatch("") is not None:
            raise ValidationError(f"Redactor custom '{name}': the expression must not match an empty text")
    elif not callable(pattern):
        raise ValidationError(
            f"Redactor custom '{name}' must be a regular expression or a function of a text, got: "
            f"{type(pattern).__name__}"
        )
