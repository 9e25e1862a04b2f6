"""Versions of a team's file: loaded while the endpoint runs, with shares of new runs, and kept for the runs that began with them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from httpx import AsyncClient, Response
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ray.access.admission import Right
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.callers import Caller
from ensemble_ray.serve.catalog import served_team
from ensemble_ray.serve.driving.ledger import Ledger
from ensemble_ray.serve.driving.versions import KEPT_VERSIONS, FileWatch, choose_version, with_share
from ensemble_ray.serve.schemas import NewRun, NewShare, NewVersion, Refusal, RunStatus
from ensemble_ray.testing import ModelServer, ScriptedModel
from tests.serve.driving import driven
from tests.serve.keys import transport_of
from tests.serve.teams import KEY, KEY_VARIABLE, pair
from tests.serve.versioned import greet, loaded, write

SEEDS = [f"run-{number}" for number in range(2000)]
WHO = {"inputs": {"who": "Ann"}}


@pytest.fixture(scope="module")
def models() -> Iterator[ModelServer]:
    """The models' endpoint."""
    with ModelServer(greet, api_key=KEY) as server:
        yield server


@pytest.fixture
def file(tmp_path: Path, models: ModelServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A team file that says Hello."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    return write(tmp_path, models.base_url, "Hello")


@asynccontextmanager
async def client_of(
    teams: Any, *, rights: frozenset[Right] = frozenset(Right), **options: Any
) -> AsyncGenerator[AsyncClient]:
    """A client with these rights."""
    api = build_api(driven(teams, **options))
    transport = transport_of(api, Caller(name="ann", rights=rights))
    async with api.router.lifespan_context(api), AsyncClient(transport=transport, base_url="http://team") as client:
        yield client


def rewrite(file: Path, text: str | None) -> None:
    """Replace the content of a file, or remove it."""
    if text is None:
        file.unlink()
    else:
        file.write_text(text, encoding="utf-8")


async def said(client: AsyncClient, **asked: Any) -> tuple[str, str]:
    """The answer of a run, and its version."""
    found = (await client.post("/runs?wait=60", json={**WHO, **asked})).json()
    return found["result"]["raw"], found["version"]


def versions_of(answer: Response) -> dict[str, float]:
    """The shares of an answer, newest version first."""
    assert answer.status_code == 200, answer.text
    return {each["version"]: each["share"] for each in answer.json()["versions"]}


@settings(deadline=None)
@given(share=st.floats(0.01, 0.99), more=st.floats(0.0, 1.0))
def test_a_version_loses_no_run_when_its_share_grows(share: float, more: float) -> None:
    """S-VER-31: the same seed has the same version, and a grown share only gains seeds."""
    before = with_share({"old": 1.0}, "new", share)
    after = with_share(before, "new", min(1.0, share + more))
    chosen = [seed for seed in SEEDS[:200] if choose_version(before, seed) == "new"]
    assert {choose_version(after, seed) for seed in chosen} <= {"new"}


@settings(deadline=None)
@given(share=st.floats(0.0, 1.0), third=st.floats(0.0, 1.0))
def test_versions_get_about_their_shares_of_runs(share: float, third: float) -> None:
    """S-VER-31: and shares add up to 1, whatever they were before."""
    shares = with_share(with_share({"a": 1.0}, "b", share), "c", third)
    assert sum(shares.values()) == pytest.approx(1.0)
    chosen = [choose_version(shares, seed) for seed in SEEDS]
    for version, expected in shares.items():
        assert chosen.count(version) / len(SEEDS) == pytest.approx(expected, abs=0.06)


def test_a_version_without_a_share_gets_no_run() -> None:
    """S-VER-30: and the only one keeps its share."""
    assert {choose_version({"old": 1.0, "new": 0.0}, seed) for seed in SEEDS} == {"old"}
    with pytest.raises(ValueError, match="no other version"):
        with_share({"old": 1.0}, "old", 0.5)


def test_a_changed_file_is_loaded_when_it_stays_the_same() -> None:
    """S-VER-40: a file that is being written is left alone, and each change is reported once."""
    watch = FileWatch()
    assert watch.changed({"team": 1, "gone": None}) == {"team": True}
    assert watch.changed({"team": 1, "gone": None}) == {}
    assert watch.changed({"team": 2, "gone": None}) == {}
    assert watch.changed({"team": 3, "gone": None}) == {}
    assert watch.changed({"team": 3, "gone": None}) == {"team": False}
    assert watch.changed({"team": None, "gone": 1}) == {}
    assert watch.changed({"team": 3, "gone": 1}) == {"gone": True}


async def test_a_changed_file_serves_new_runs_without_a_restart(file: Path, models: ModelServer) -> None:
    """S-VER-20, S-VER-21: teams and runs show their version, and lists find it by its tag."""
    async with client_of(loaded(file)) as client:
        (before,) = (await client.get("/ensembles")).json()["ensembles"]
        first = await said(client)
        write(file.parent, models.base_url, "Servus")
        assert await said(client) == first == ("Hello", before["version"])
        shares = versions_of(await client.post("/ensembles/greeting/versions"))
        second = await said(client)
        (after,) = (await client.get("/ensembles")).json()["ensembles"]
        listed = (await client.get(f"/runs?tag=version:{second[1]}")).json()["runs"]
    assert second[0] == "Servus"
    assert shares == {second[1]: 1.0, first[1]: 0.0}
    assert after["version"] == second[1] != first[1]
    assert after["loaded_at"] > before["loaded_at"]
    assert [(each["version"], each["tags"]) for each in listed] == [(second[1], {"version": second[1], "user": "ann"})]


async def test_a_file_that_cannot_be_loaded_changes_nothing(file: Path) -> None:
    """S-VER-22: the answer has the place of the mistake, and the version before serves."""
    teams = loaded(file)
    text = teams["greeting"].text or ""
    wrong = {
        "greeting.yaml:6:5: tasks[0].descripton": text.replace("description:", "descripton:"),
        "greeting.yaml:10:6: not valid YAML": f"{text}\n  - [",
        "names its team 'other'": f"name: other\n{text}",
        "NO_KEY_OF_MINE": text.replace(KEY_VARIABLE, "NO_KEY_OF_MINE"),
    }
    async with client_of(teams) as client:
        version = (await said(client))[1]
        for words, each in wrong.items():
            rewrite(file, each)
            refused = await client.post("/ensembles/greeting/versions")
            assert (refused.status_code, refused.json()["code"]) == (422, "VERSION_INVALID")
            assert words in refused.json()["message"]
        rewrite(file, None)
        gone = await client.post("/ensembles/greeting/versions")
        assert "There is no file" in gone.json()["message"]
        assert await said(client) == ("Hello", version)
        assert versions_of(await client.get("/ensembles/greeting/versions")) == {version: 1.0}


async def test_a_tag_of_the_request_or_the_team_replaces_the_tag_of_the_version(
    file: Path, models: ModelServer, records: Path
) -> None:
    """S-VER-23: in lists and in the record; a request may have 64 tags."""
    async with client_of(loaded(file)) as client:
        version = (await said(client, run_id="plain"))[1]
        await said(client, run_id="own", tags={"version": "mine"})
        await said(client, run_id="many", tags={f"tag-{number}": "" for number in range(64)})
        write(file.parent, models.base_url, "Hello", more="tags: {version: '3'}")
        await client.post("/ensembles/greeting/versions")
        await said(client, run_id="team")
        tags = {each["run_id"]: each["tags"] for each in (await client.get("/runs")).json()["runs"]}
    recorded = {name: RunDirectory(records, name).facts()[0].data.to_data() for name in tags}
    assert [tags[name]["version"] for name in ("plain", "own", "team")] == [version, "mine", "3"]
    assert recorded["plain"]["options"] == {"tags": {"version": version}, "user": "ann"}
    assert recorded["own"]["options"] == {"tags": {"version": "mine"}, "user": "ann"}
    assert "version" not in recorded["many"]["options"]["tags"]
    assert recorded["team"]["options"] == {"user": "ann"}


async def test_a_key_that_the_version_before_lacks_is_not_asked_for(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-VER-22: on a cluster, other nodes have the keys; a version that calls a model of this node needs its key here."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    of_this_node, of_others = loaded(file), "llm: openai:any\ntasks:\n  - {name: greet, description: Greet}\n"
    async with client_of(of_this_node) as client:
        rewrite(file, of_others)
        refused = await client.post("/ensembles/greeting/versions")
    async with client_of(loaded(file)) as client:
        rewrite(file, f"{of_others}# changed\n")
        accepted = await client.post("/ensembles/greeting/versions")
    assert (refused.status_code, "OPENAI_API_KEY" in refused.json()["message"]) == (422, True)
    assert accepted.status_code == 200


async def test_a_module_keeps_its_code_until_the_next_deployment(
    tmp_path: Path, models: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-VER-37, S-VER-22: only the text of the file is versioned; code that fails while it is loaded changes nothing."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.syspath_prepend(str(tmp_path))
    rewrite(tmp_path / "handler_of_version.py", "def greet(context):\n    return 'first'\n")
    path = tmp_path / "greeting.yaml"
    text = "tasks:\n  - {name: greet, description: 'Greet {who}', handler: 'handler_of_version:greet'}\n"
    rewrite(path, text)
    async with client_of(loaded(path)) as client:
        first = await said(client)
        rewrite(tmp_path / "handler_of_version.py", "def greet(context):\n    return 'second'\n")
        rewrite(path, f"{text}# changed\n")
        await client.post("/ensembles/greeting/versions")
        second = await said(client)
        rewrite(tmp_path / "broken_of_version.py", "raise OSError('no disk')\n")
        rewrite(path, text.replace("handler_of", "broken_of"))
        refused = await client.post("/ensembles/greeting/versions")
        third = await said(client)
    assert (first[0], second[0], third) == ("first", "first", second)
    assert first[1] != second[1]
    assert (refused.status_code, "no disk" in refused.json()["message"]) == (422, True)


async def test_a_version_gets_a_share_and_is_promoted_or_rolled_back(file: Path, models: ModelServer) -> None:
    """S-VER-30, S-VER-32: by the operator; a repeated request has the same run."""
    async with client_of(loaded(file)) as client:
        old = (await said(client))[1]
        write(file.parent, models.base_url, "Servus")
        shares = versions_of(await client.post("/ensembles/greeting/versions", json={"share": 0.5}))
        (new,) = shares.keys() - {old}
        assert shares == {new: 0.5, old: 0.5}
        found = {}
        for number in range(12):
            headers = {"idempotency-key": f"key-{number}"}
            once, again = [(await client.post("/runs?wait=60", json=WHO, headers=headers)).json() for _ in range(2)]
            assert once == again
            expected = choose_version(shares, f"ann:key-{number}")
            assert (once["result"]["raw"], once["version"]) == ("Servus" if expected == new else "Hello", expected)
            found[once["version"]] = once
        assert found.keys() == {old, new}
        by_name = f"/ensembles/greeting/versions/{new}"
        assert versions_of(await client.post(by_name, json={"share": 0})) == {new: 0.0, old: 1.0}
        assert await said(client, version=new) == ("Servus", new), "a request may name a version without a share"
        assert versions_of(await client.post(by_name, json={"share": 1})) == {new: 1.0, old: 0.0}
        refused = await client.post(by_name, json={"share": 0})
        assert versions_of(await client.post("/ensembles/greeting/versions")) == {new: 1.0, old: 0.0}
        lines = (await client.get("/metrics")).text.splitlines()
        status = (await client.post(by_name, json={"share": 1.5})).status_code
    assert (refused.status_code, refused.json()["code"], status) == (409, "VERSION_NEEDED", 422)
    assert f'ensemble_ray_version_share{{ensemble="greeting",version="{new}"}} 1' in lines
    assert f'ensemble_ray_version_share{{ensemble="greeting",version="{old}"}} 0' in lines
    ended = f'ensemble_ray_version_runs_ended_total{{ensemble="greeting",version="{new}",status="completed"}}'
    assert [line for line in lines if line.startswith(ended)]


async def test_a_version_that_is_not_loaded_is_not_found(file: Path) -> None:
    """S-VER-24: in a request for a run, and in the path."""
    async with client_of(loaded(file)) as client:
        version = (await said(client))[1]
        answers = [
            await client.post("/runs", json={**WHO, "version": "0" * 12}),
            await client.post("/ensembles/greeting/versions/x", json={"share": 1}),
        ]
        unknown = await client.post("/ensembles/none/versions")
        kept = (await client.get("/runs")).json()["runs"]
    assert [(each.status_code, each.json()["code"]) for each in answers] == [(404, "VERSION_NOT_FOUND")] * 2
    assert f"There are: [{version}]" in answers[0].json()["message"]
    assert unknown.json()["code"] == "ENSEMBLE_NOT_FOUND"
    assert len(kept) == 1


async def test_versions_that_clients_call_differently_do_not_share_runs(file: Path, models: ModelServer) -> None:
    """S-VER-33: another input, or another last task of a stream."""
    async with client_of(loaded(file)) as client:
        write(file.parent, models.base_url, "Servus to {town} and")
        refused = await client.post("/ensembles/greeting/versions", json={"share": 0.5})
        accepted = await client.post("/ensembles/greeting/versions", json={"share": 1})
        missing = await client.post("/runs", json=WHO)
    assert (refused.status_code, refused.json()["code"]) == (409, "VERSIONS_DIFFER")
    assert "inputs" in refused.json()["message"]
    assert (accepted.status_code, missing.json()["missing"]) == (200, ["town"])


async def test_a_repeated_request_is_answered_when_its_team_has_other_inputs_now(
    file: Path, models: ModelServer
) -> None:
    """S-VER-32, S-SRV-14, S-SRV-15: by its id and by its key."""
    async with client_of(loaded(file)) as client:
        for headers in ({}, {"idempotency-key": "mine"}):
            asked = {**WHO, **({} if headers else {"run_id": "first"})}
            before = (await client.post("/runs?wait=60", json=asked, headers=headers)).json()
            write(file.parent, models.base_url, "Servus to {town} and")
            assert (await client.post("/ensembles/greeting/versions")).status_code == 200
            assert (await client.post("/runs?wait=60", json=asked, headers=headers)).json() == before
            write(file.parent, models.base_url, "Hello")
            assert (await client.post("/ensembles/greeting/versions")).status_code == 200


async def test_a_team_of_a_module_has_no_versions() -> None:
    """S-VER-26: the answer says what to do, and its runs show none."""
    team = pair(ScriptedModel(otherwise="fine"))
    async with client_of({"team": served_team("team", team)}) as client:
        answers = [await client.post("/ensembles/team/versions"), await client.get("/ensembles/team/versions")]
        inputs = {"topic": "Ray", "reader": "children"}
        named = await client.post("/runs", json={"inputs": inputs, "version": "1"})
        run = (await client.post("/runs?wait=60", json={"inputs": inputs})).json()
        (info,) = (await client.get("/ensembles")).json()["ensembles"]
    assert {(each.status_code, each.json()["code"]) for each in (*answers, named)} == {(409, "VERSIONS_NOT_TAKEN")}
    assert "version" not in run
    assert "version" not in info


@pytest.mark.parametrize("right", [Right.RUN, Right.READ])
async def test_versions_are_changed_with_the_right_to_administer(file: Path, right: Right) -> None:
    """S-VER-27: they are listed with the right to read."""
    async with client_of(loaded(file), rights=frozenset({right})) as client:
        refused = [
            await client.post("/ensembles/greeting/versions"),
            await client.post("/ensembles/greeting/versions/x", json={"share": 1}),
        ]
        listed = await client.get("/ensembles/greeting/versions")
    assert [each.json()["code"] for each in refused] == ["FORBIDDEN"] * 2
    assert listed.status_code == (200 if right is Right.READ else 403)


async def test_open_runs_keep_their_version_after_a_restart(file: Path, models: ModelServer, tmp_path: Path) -> None:
    """S-VER-25, S-VER-28: a run that waits for a person, and shares; the file on the disk is a third version."""
    ledger = tmp_path / "ledger.sqlite"
    write(file.parent, models.base_url, "Hello", is_reviewed=True)
    async with driven(loaded(file), ledger=ledger, deployed_at=1.0) as runs:
        await runs.start(NewRun(inputs={"who": "Ann"}, run_id="waiting"))
        assert (await runs.wait("waiting", 60)).status is RunStatus.WAITING
        write(file.parent, models.base_url, "Servus", is_reviewed=True)
        before = await runs.load_version("greeting", NewVersion(share=0.5))
        assert [each.open_runs for each in before.versions] == [0, 1]
    write(file.parent, models.base_url, "Moin", is_reviewed=True)
    async with driven(loaded(file), ledger=ledger, deployed_at=1.0) as runs:
        assert await runs.versions("greeting") == before
        found = await runs.get("waiting")
        assert found.version == before.versions[1].version
        (gate,) = found.reviews
        assert gate.task_output == "Hello"
        assert "Say Hello" in str(runs._active["waiting"].team.definition.model_dump()["tasks"])
    async with driven(loaded(file), ledger=ledger, deployed_at=2.0) as runs:
        after = await runs.versions("greeting")
        assert [each.share for each in after.versions] == [1.0, 0.0, 0.0], "a newer deployment begins with its file"
        assert (await runs.get("waiting")).version == before.versions[1].version
        assert "Say Hello" in str(runs._active["waiting"].team.definition.model_dump()["tasks"])


async def test_versions_that_no_run_uses_are_removed(file: Path, models: ModelServer, tmp_path: Path) -> None:
    """S-VER-29: only the newest ones are kept, and versions of open runs."""
    path = tmp_path / "ledger.sqlite"
    write(file.parent, models.base_url, "Hello", is_reviewed=True)
    async with driven(loaded(file), ledger=path) as runs:
        await runs.start(NewRun(inputs={"who": "Ann"}, run_id="waiting"))
        await runs.wait("waiting", 60)
        for number in range(KEPT_VERSIONS + 2):
            write(file.parent, models.base_url, f"Servus {number}", is_reviewed=True)
            found = await runs.load_version("greeting", NewVersion())
        assert len(found.versions) == KEPT_VERSIONS + 1
        first = found.versions[-1]
        assert (first.open_runs, first.version) == (1, (await runs.get("waiting")).version)
        await runs.cancel("waiting")
        assert [each.type async for each in runs.events("waiting")][-1] == "ensemble_completed"
        newest = found.versions[0].version
        found = await runs.share_version("greeting", newest, NewShare(share=1))
        assert len(found.versions) == KEPT_VERSIONS
        with pytest.raises(Refusal, match="no loaded version"):
            await runs.start(NewRun(inputs={"who": "Ann"}, version=first.version))
    ledger = Ledger(path)
    assert len(ledger.documents("version_text")) == KEPT_VERSIONS
    ledger.close()


async def test_a_stored_version_that_cannot_be_loaded_leaves_its_runs_to_the_current_one(
    file: Path, models: ModelServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S-VER-28: a warning names it; the file is served."""
    path = tmp_path / "ledger.sqlite"
    async with driven(loaded(file), ledger=path) as runs:
        (version,) = (await runs.versions("greeting")).versions
    write(file.parent, models.base_url, "Servus")
    ledger = Ledger(path)
    (document,) = ledger.documents("version_text")
    ledger._write(lambda execute: execute("UPDATE documents SET text = 'tasks: 3' WHERE name = ?", [document]))
    ledger.close()
    async with driven(loaded(file), ledger=path) as runs:
        (found,) = (await runs.versions("greeting")).versions
    assert (found.share, found.version != version.version) == (1.0, True)
    assert f"Version '{version.version}' of the team 'greeting' cannot be loaded any more" in caplog.text


async def test_a_watched_file_is_loaded_by_itself(
    file: Path, models: ModelServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S-VER-40: when it has changed; a file with a mistake is one warning."""
    from ensemble_ray.serve.driving import driven_runs

    monkeypatch.setattr(driven_runs, "WATCH_S", 0.01)
    async with client_of(loaded(file), watch=True) as client:
        assert (await said(client))[0] == "Hello"
        write(file.parent, models.base_url, "Servus")
        while (await said(client))[0] == "Hello":
            pass
        rewrite(file, "tasks: 3")
        while "is not served" not in caplog.text:
            await client.get("/ensembles")
        assert (await said(client))[0] == "Servus"
    assert caplog.text.count("is not served") == 1
