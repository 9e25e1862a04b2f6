"""Versions of the teams of an endpoint: their shares of new runs, and the documents that keep them.

A version is the text of a team's file. Runs keep the version with which they were accepted, also in the next process.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray import ChatModel, ValidationError
from ensemble_ray.definition.validation import check_model_keys
from ensemble_ray.errors import EnsembleError, IllegalStateError, message_of
from ensemble_ray.errors.texts import describe
from ensemble_ray.process.concurrency import SystemClock, threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.serve.catalog import ServedTeam, TeamName, version_of
from ensemble_ray.serve.driving.ledger import Document, RunLedger, part_of_name
from ensemble_ray.serve.schemas import Refusal, TeamVersionInfo
from ensemble_ray.teamfile import find_planned_form

_log = bounded_logger(__name__)
#: Kinds of documents: the shares of a team's versions, and the text of one version.
SHARES_KIND, TEXT_KIND = "version_shares", "version_text"
#: Versions without a share and without an open run that are kept, so that they can be promoted again.
KEPT_VERSIONS = 5
#: Interval of the looks at team files, s.
WATCH_S = 2.0
_BITS = 52
_SHOWN = 20
#: Returns team and version of all open runs.
UsedVersions = Callable[[], Collection[tuple[str, str | None]]]


def choose_version(shares: Mapping[str, float], seed: str) -> str:
    """Return the version of a run, by weighted rendezvous hashing of its seed (S-VER-31).

    The same seed always returns the same version. While the share of a version grows, the version loses none of its seeds.

    Examples:
        >>> choose_version({"a": 0.0, "b": 1.0}, "any")
        'b'
    """

    def score(version: str) -> float:
        digest = hashlib.sha256(f"{version} {seed}".encode()).digest()
        number = (int.from_bytes(digest[:8]) >> (64 - _BITS)) + 0.5  # in the middle, so neither 0 nor 1
        return shares[version] / -math.log(number / 2**_BITS)

    chosen = [version for version, share in shares.items() if share > 0]
    return chosen[0] if len(chosen) == 1 else max(chosen, key=score)


def with_share(shares: Mapping[str, float], version: str, share: float) -> dict[str, float]:
    """Return the shares after a version got this one. The others divide the rest in their proportions.

    Raises:
        ValueError: there is a rest, and no other version has a share.

    Examples:
        >>> with_share({"old": 1.0}, "new", 0.25)
        {'old': 0.75, 'new': 0.25}
    """
    others = {name: each for name, each in shares.items() if name != version}
    total = sum(others.values())
    rest = 1.0 - share
    if rest > 0 and total <= 0:
        raise ValueError("no other version has a share")
    return {name: each * rest / total if total else 0.0 for name, each in others.items()} | {version: share}


class LoadedVersion(Struct, frozen=True, kw_only=True):
    team: ServedTeam
    share: float
    loaded_at: datetime


class StoredShare(Struct, frozen=True, kw_only=True):
    share: float
    loaded_at: datetime


class _StoredShares(Struct, frozen=True, kw_only=True):
    #: of the newest deployment, Unix time, s
    deployed_at: float
    versions: Mapping[str, StoredShare]

    @classmethod
    def read(cls, text: str) -> _StoredShares:
        data = json.loads(text)
        return cls(
            deployed_at=data["deployed_at"],
            versions={
                version: StoredShare(share=share, loaded_at=datetime.fromisoformat(loaded_at))
                for version, (share, loaded_at) in data["versions"].items()
            },
        )

    def write(self) -> str:
        versions = {name: [each.share, each.loaded_at.isoformat()] for name, each in self.versions.items()}
        return json.dumps({"deployed_at": self.deployed_at, "versions": versions})


class TeamVersions:
    """The versions of all teams of an endpoint. A team without a file has one version, of an empty name."""

    def __init__(self, ledger: RunLedger, models: Mapping[str, ChatModel], *, deployed_at: float) -> None:
        self._ledger = ledger
        self._models = models
        self._deployed_at = deployed_at
        self._teams: dict[str, dict[str, LoadedVersion]] = {}
        self._changing = asyncio.Lock()

    def serve(self, name: str, team: ServedTeam) -> None:
        """Serve a team for all new runs, in place of its versions."""
        self._teams[name] = {team.version: self._loaded(team, share=1.0, loaded_at=_now())}

    @property
    def teams(self) -> Mapping[str, ServedTeam]:
        """The version of each team that gets most new runs."""
        return {name: self._main(name).team for name in self._teams}

    def find(self, name: str, version: str | None) -> ServedTeam | None:
        """Return a loaded version; of a team without a file, its only one."""
        found = self._teams.get(name, {}).get(version or "")
        return None if found is None else found.team

    def assign(self, name: str, wanted: str | None, seed: str) -> ServedTeam:
        """Return the version for a new run: the named one, or one by the shares."""
        versions = self._teams[name]
        if wanted is None:
            shares = {version: each.share for version, each in versions.items()}
            return versions[choose_version(shares, seed)].team
        return self._get(name, wanted).team

    def check_loaded(self, team: ServedTeam) -> None:
        """Raise a `Refusal` if an assigned version was removed before its run was accepted."""
        if self.find(team.info.name, team.version) is None:
            self._get(team.info.name, team.version)

    def recovered(self, name: str, version: str | None) -> ServedTeam:
        """Return the version with which a run of an earlier process was accepted."""
        found = self.find(name, version)
        if found is None:
            found = self._main(name).team
            if version:  # an earlier release stored none
                _log.warning(
                    "Version '%s' of the team '%s' is lost. Its runs continue with '%s'", version, name, found.version
                )
        return found

    def infos(self, name: str, open_runs: Mapping[str, int]) -> list[TeamVersionInfo]:
        """Return the versions of a team, newest first. `open_runs` are counts by version."""
        found = self._versions_of(name)
        return [
            TeamVersionInfo(
                version=version, share=each.share, loaded_at=each.loaded_at, open_runs=open_runs.get(version, 0)
            )
            for version, each in sorted(found.items(), key=lambda pair: pair[1].loaded_at, reverse=True)
        ]

    def shares(self) -> Mapping[str, Mapping[str, float]]:
        """Return the shares of all versions of files, by team."""
        return {
            name: {version: each.share for version, each in versions.items()}
            for name, versions in self._teams.items()
            if "" not in versions
        }

    async def restore(self, in_use: UsedVersions) -> None:
        """Load the versions that an earlier process stored. `in_use` returns those of open runs.

        A newer deployment begins with the version of its file, the same deployment with the stored shares (S-VER-25).
        """
        stored = await threads.run(self._ledger.documents, SHARES_KIND)
        for name in [each for each, versions in self._teams.items() if "" not in versions]:
            before = _StoredShares.read(stored[name]) if name in stored else None
            texts = await threads.run(self._ledger.documents, TEXT_KIND, prefix=_prefix(name))
            await self._restore_team(name, before, texts, in_use)

    async def _restore_team(
        self,
        name: str,
        before: _StoredShares | None,
        texts: Mapping[str, str],
        in_use: UsedVersions,
    ) -> None:
        (of_file,) = self._teams[name].values()
        known, used = {} if before is None else dict(before.versions), in_use()
        is_restart = before is not None and before.deployed_at >= self._deployed_at
        found: dict[str, LoadedVersion] = {}
        for version, each in known.items():
            text = texts.get(f"{_prefix(name)}{version}")
            is_wanted = each.share > 0 or (name, version) in used or version in _newest(known)
            if text is not None and is_wanted and (team := await self._load_stored(of_file, version, text)) is not None:
                found[version] = self._loaded(team, share=each.share, loaded_at=each.loaded_at)
        if not (is_restart and any(each.share > 0 for each in found.values())):
            version = of_file.team.version
            loaded_at = found[version].loaded_at if version in found else of_file.loaded_at
            found = {key: replace(each, share=0.0) for key, each in found.items()}
            found[version] = self._loaded(of_file.team, share=1.0, loaded_at=loaded_at)
        await self._store(name, found, in_use, stored=texts)

    async def _load_stored(self, of_file: LoadedVersion, version: str, text: str) -> ServedTeam | None:
        if version == of_file.team.version:
            return of_file.team
        try:
            return await threads.run(_place_of(of_file.team).load_version, text)
        except Exception as error:  # noqa: BLE001  the code of a team can raise anything
            _log.warning(
                "Version '%s' of the team '%s' cannot be loaded any more: %s",
                version,
                of_file.team.info.name,
                describe(error),
            )
            return None

    async def add(self, name: str, share: float, in_use: UsedVersions) -> str:
        """Load the file of a team again, and return its version, which gets this share of new runs.

        `Refusal`: the team has no file, or the text of the file cannot be served. The versions before stay then.
        """
        async with self._changing:
            main = self._main(name).team if name in self._teams else None
            if main is None or main.place is None:
                raise _no_file(name)
            text = await _read(main.place)
            team = await threads.run(_load, name, main, text)
            found = dict(self._teams[name])
            before = found.get(team.version)
            loaded_at = _now() if before is None else before.loaded_at
            found[team.version] = self._loaded(team, share=share, loaded_at=loaded_at)
            await self._share(name, found, team.version, share, in_use)
            return team.version

    async def share(self, name: str, version: str, share: float, in_use: UsedVersions) -> None:
        """Change the share of a loaded version. `Refusal`: there is no such version, or no other one that gets the rest."""
        async with self._changing:
            self._get(name, version)
            await self._share(name, self._teams[name], version, share, in_use)

    async def load_changed(self, watch: FileWatch, in_use: UsedVersions) -> None:
        """Load the files that have changed. Their versions get all new runs, unless they have a share already (S-VER-40)."""
        mains = {name: team.place for name, team in self.teams.items() if team.place is not None}
        stamps = await threads.run(lambda: {name: stamp_of(place) for name, place in mains.items()})
        for name, is_first in watch.changed(stamps).items():
            try:
                version = version_of(await _read(mains[name]))
                known = self._teams[name].get(version)
                # After a restart, a version that was rolled back before is not promoted.
                if known is None or (known.share == 0 and not is_first):
                    await self.add(name, 1.0, in_use)
            except Refusal as refusal:
                _log.warning("The changed file of the team '%s' is not served: %s", name, refusal.message)

    async def _share(
        self, name: str, found: Mapping[str, LoadedVersion], version: str, share: float, in_use: UsedVersions
    ) -> None:
        before = self._teams[name]
        try:
            changed = with_share({key: each.share for key, each in before.items()}, version, share)
        except ValueError:
            text = (
                f"Version '{version}' is the only one of the team '{name}' with a share of new runs. What to do: give another "
                "version a share of 1, or drain the endpoint"
            )
            raise Refusal(HTTPStatus.CONFLICT, "VERSION_NEEDED", text) from None
        divided = {key: replace(each, share=changed[key]) for key, each in found.items()}
        _check_similar(name, [each.team for each in divided.values() if each.share > 0])
        await self._store(name, divided, in_use, stored={f"{_prefix(name)}{each}" for each in before})
        shown = ", ".join(f"{key}: {each.share:g}" for key, each in self._teams[name].items() if each.share > 0)
        _log.info("Shares of the versions of the team '%s': %s", name, shown)

    async def _store(
        self, name: str, found: Mapping[str, LoadedVersion], in_use: UsedVersions, *, stored: Collection[str]
    ) -> None:
        """Store and use these versions, without those that no run needs. `stored` are the names of stored texts."""
        prefix, before = _prefix(name), self._teams[name]
        new = [version for version in found if f"{prefix}{version}" not in stored]
        texts = [Document(kind=TEXT_KIND, name=f"{prefix}{each}", text=found[each].team.text) for each in new]
        await threads.run(self._ledger.put, *texts)  # before a run can have the version
        used, newest = in_use(), _newest(found)
        kept = {
            version: each
            for version, each in found.items()
            if each.share > 0 or (name, version) in used or version in newest
        }
        self._teams[name] = kept
        versions = {key: StoredShare(share=each.share, loaded_at=each.loaded_at) for key, each in kept.items()}
        shares = _StoredShares(deployed_at=self._deployed_at, versions=versions).write()
        gone = {*stored, *(each.name for each in texts)} - {f"{prefix}{version}" for version in kept}
        deleted = [Document(kind=TEXT_KIND, name=each, text=None) for each in sorted(gone)]
        try:
            await threads.run(self._ledger.put, Document(kind=SHARES_KIND, name=name, text=shares), *deleted)
        except BaseException:
            self._teams[name] = before
            raise

    def _loaded(self, team: ServedTeam, *, share: float, loaded_at: datetime) -> LoadedVersion:
        if team.version:
            team = replace(team, info=team.info.model_copy(update={"loaded_at": loaded_at}))
        return LoadedVersion(team=team.with_models(self._models), share=share, loaded_at=loaded_at)

    def _main(self, name: str) -> LoadedVersion:
        return max(self._teams[name].values(), key=lambda each: (each.share, each.loaded_at))

    def _versions_of(self, name: str) -> Mapping[str, LoadedVersion]:
        found = self._teams.get(name, {})
        if not found or "" in found:
            raise _no_file(name)
        return found

    def _get(self, name: str, version: str) -> LoadedVersion:
        versions = self._versions_of(name)
        if version not in versions:
            known = ", ".join(list(versions)[:_SHOWN])
            text = f"The team '{name}' has no loaded version '{version[:200]}'. There are: [{known}]"
            raise Refusal(HTTPStatus.NOT_FOUND, "VERSION_NOT_FOUND", text)
        return versions[version]


def _now() -> datetime:
    return datetime.fromtimestamp(SystemClock().now(), UTC)


def _prefix(name: str) -> str:
    return f"{part_of_name(name)}/"


def _newest(versions: Mapping[str, LoadedVersion] | Mapping[str, StoredShare]) -> Sequence[str]:
    return sorted(versions, key=lambda version: versions[version].loaded_at)[-KEPT_VERSIONS:]


def _place_of(team: ServedTeam) -> TeamName:
    assert team.place is not None  # noqa: S101  a team with a version has a file
    return team.place


def _no_file(name: str) -> Refusal:
    text = (
        f"The team '{name}' was not loaded from a YAML file, so it has no versions: Python keeps modules that it has imported. "
        "What to do: deploy the endpoint again"
    )
    return Refusal(HTTPStatus.CONFLICT, "VERSIONS_NOT_TAKEN", text)


async def _read(place: TeamName) -> str:
    try:
        text = await threads.run(place.read)
    except ValidationError as error:
        raise _invalid(error) from error
    if text is None:  # the file was replaced by another kind
        raise _no_file(place.shown)
    return text


def _invalid(error: Exception) -> Refusal:
    is_own = isinstance(error, EnsembleError | IllegalStateError)
    shown = message_of(error) if is_own else describe(error)
    text = f"The version cannot be loaded, and the one before stays: {shown}"
    name = type(error).__name__ if is_own else "InternalError"
    return Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "VERSION_INVALID", text, error=name)


def _load(name: str, before: ServedTeam, text: str) -> ServedTeam:
    """Load a version, or refuse it. Blocks."""
    try:
        team = _place_of(before).load_version(text)
        if _has_keys(before):  # otherwise other nodes of the cluster have the keys
            check_model_keys(find_planned_form(team.definition) or team.definition)
    except Exception as error:
        raise _invalid(error) from error  # the code of a team can raise anything
    if team.info.name != name:
        text = f"The file names its team '{team.info.name}', and a version keeps the name '{name}'"
        raise _invalid(ValidationError(text))
    return team


def _has_keys(team: ServedTeam) -> bool:
    try:
        check_model_keys(find_planned_form(team.definition) or team.definition)
    except ValidationError:
        return False
    return True


def _check_similar(name: str, teams: Sequence[ServedTeam]) -> None:
    """Refuse to divide new runs between versions that clients call in different ways (S-VER-33)."""
    first = teams[0].info
    for other in (each.info for each in teams[1:]):
        for field in ("inputs", "takes_items", "chat"):
            one, two = getattr(first, field), getattr(other, field)
            if one != two:
                text = (
                    f"Versions '{first.version}' and '{other.version}' of the team '{name}' differ in their {field} ({one} and {two}), "
                    "so clients cannot call both. What to do: give the version a share of 1, or of 0 and name it in requests"
                )
                raise Refusal(HTTPStatus.CONFLICT, "VERSIONS_DIFFER", text)


class FileWatch:
    """Decides which team files to load again, from looks at them."""

    def __init__(self) -> None:
        self._seen: dict[str, object] = {}
        self._loaded: dict[str, object] = {}

    def changed(self, stamps: Mapping[str, object]) -> Mapping[str, bool]:
        """Return the teams whose files have changed and then stayed the same for one look, and whether it is their first look.

        Each changed file is returned once. A stamp of None: the file cannot be read.
        """
        found = {
            name: name not in self._loaded
            for name, stamp in stamps.items()
            if stamp is not None and stamp != self._loaded.get(name) and self._seen.get(name, stamp) == stamp
        }
        self._seen.update(stamps)
        self._loaded.update({name: stamps[name] for name in found})
        return found


def stamp_of(place: TeamName) -> object:
    """Return a value that changes with a file; None: it cannot be read now. Blocks."""
    try:
        found = Path(place.target).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def count_by_version(open_runs: Iterable[tuple[str, str | None]], name: str) -> Mapping[str, int]:
    """Return the number of open runs of a team by version."""
    found: dict[str, int] = {}
    for team, version in open_runs:
        if team == name and version is not None:
            found[version] = found.get(version, 0) + 1
    return found
