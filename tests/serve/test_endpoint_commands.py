"""`ensemble-ray drain`, `reload`, `versions`, `deliveries` and `keys usage`: commands that call an endpoint over HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import Ensemble
from ensemble_ray.access.admission import KeyPolicy, Right
from ensemble_ray.access.key_store import KeyFile
from ensemble_ray.cli.commands import endpoint
from ensemble_ray.cli.inputs import options
from ensemble_ray.serve.api import build_api
from ensemble_ray.serve.callers import CallerCache
from ensemble_ray.testing import ModelServer
from tests.builders import task
from tests.command_line import Call, calling
from tests.scenarios.teams import until
from tests.serve.driving import driven
from tests.serve.http_server import served_app
from tests.serve.keys import make_key, standing_callers
from tests.serve.teams import KEY, KEY_VARIABLE
from tests.serve.versioned import greet, loaded, write
from tests.serve.webhook_receiver import Receiver, rules


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls a command in this process."""
    return calling(capsys)


@pytest.fixture
def models() -> Iterator[ModelServer]:
    """The models' endpoint."""
    with ModelServer(greet, api_key=KEY) as server:
        yield server


@pytest.fixture
def file(tmp_path: Path, models: ModelServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A team file whose runs wait for a person."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    monkeypatch.setattr(endpoint, "_POLL_S", 0.01)
    return write(tmp_path, models.base_url, "Hello", is_reviewed=True)


@pytest.fixture
def url(file: Path) -> Iterator[str]:
    """An endpoint of that team, with a real HTTP server."""
    with served_app(build_api(driven(loaded(file)))) as found:
        yield found


def start(url: str, **asked: Any) -> Any:
    """Begin a run, and wait until it waits for a person."""
    return endpoint.EndpointClient(url, None).ask("POST", "/runs?wait=60", {"inputs": {"who": "Ann"}, **asked})


def test_a_drain_reports_its_progress_until_no_run_is_open(url: str, call: Call) -> None:
    """S-VER-10, S-VER-11: runs that wait for people count only with --waiting; the limit of time is exit code 1."""
    start(url, run_id="first")
    client = endpoint.EndpointClient(url, None)
    stopped = call("drain", "--url", url, "--no-waiting")
    assert (stopped.code, stopped.printed) == (0, f"{url}: draining, 1 open run: 1 waiting for people\n")
    over = call("drain", "--url", url, "--timeout", "0.05")
    assert (over.code, over.printed) == (1, f"{url}: serving, 1 open run: 1 waiting for people\n")
    assert "accepts new runs again" in over.said
    client.ask("POST", "/runs/first/cancel")
    done = call("drain", "--url", url, "--json")
    assert (done.code, json.loads(done.printed)["state"]) == (0, "drained")
    ended = call("drain", "--url", url, "--end")
    assert (ended.code, ended.printed) == (0, f"{url}: serving, 0 open runs\n")


def test_an_interrupted_drain_goes_on(url: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-VER-11: Ctrl-C ends the wait alone, and the command says how to end the drain."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(endpoint, "wait_until_drained", interrupt)
    called = call("drain", "--url", url)
    assert called.code == 130
    assert f"drain --end --url {url}" in called.said
    assert endpoint.EndpointClient(url, None).ask("GET", "/drain")["state"] == "drained"


def test_a_drain_waits_for_an_endpoint_that_does_not_answer_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-VER-11: its process may restart meanwhile; an endpoint that stays away is an error."""
    monkeypatch.setattr(endpoint, "_POLL_S", 0.0)
    counts = {"accepted": 0, "running": 1, "waiting": 0}
    begun = {"state": "draining", "open": counts}
    ended = {"state": "drained", "open": {**counts, "running": 0}}
    answers = iter([None, begun, None, ended])

    def look() -> Any:
        found = next(answers)
        if found is None:
            raise endpoint.EndpointError("down")
        return found

    def leave() -> Any:
        raise endpoint.EndpointError("down")

    assert endpoint.wait_until_drained(look, begun, needs_waiting=True) == ended
    monkeypatch.setattr(endpoint, "_PATIENCE_S", -1.0)
    with pytest.raises(endpoint.EndpointError):
        endpoint.wait_until_drained(leave, begun, needs_waiting=True)


def test_a_file_is_loaded_again_and_its_versions_are_listed(
    url: str, file: Path, models: ModelServer, call: Call
) -> None:
    """S-VER-34, S-VER-35: shares are changed by the name of a version; a wrong file is exit code 2."""
    start(url, run_id="first")
    write(file.parent, models.base_url, "Servus", is_reviewed=True)
    loaded_now = call("reload", "greeting", "--share", "0.25", "--url", url)
    assert loaded_now.code == 0
    head, *rows = [line.split() for line in loaded_now.printed.splitlines()]
    assert head == ["version", "share", "open", "runs", "loaded"]
    assert [row[1:3] for row in rows] == [["0.25", "0"], ["0.75", "1"]]
    new = rows[0][0]
    promoted = call("versions", "greeting", new, "--share", "1", "--url", url, "--json")
    assert [each["share"] for each in json.loads(promoted.printed)["versions"]] == [1.0, 0.0]
    assert call("versions", "greeting", "--url", url).printed.splitlines()[1].split()[:2] == [new, "1"]
    file.write_text("tasks: 3", encoding="utf-8")
    refused = call("reload", "greeting", "--url", url)
    assert refused.code == 2
    assert f"{file}:1:" in refused.said
    unknown = call("versions", "none", "--url", url)
    assert (unknown.code, "There is no team 'none'" in unknown.said) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("drain", "--url", "ftp://a"), "is not the address of an endpoint"),
        (("drain", "--timeout", "0"), "--timeout must be > 0"),
        (("reload", "a", "--share", "2"), "--share must be in the range 0 to 1"),
        (("versions", "a", "b"), "belong together"),
        (("versions", "a", "--key", "a\nb"), "holds a line break"),
    ],
)
def test_wrong_options_are_refused_before_a_request(arguments: tuple[str, ...], words: str, call: Call) -> None:
    """S-VER-36: with exit code 2."""
    called = call(*arguments)
    assert (called.code, words in called.said) == (2, True), called.said


def test_an_endpoint_that_is_not_there_is_named(call: Call) -> None:
    """S-VER-36: exit code 1."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    called = call("versions", "a", "--url", address)
    assert (called.code, f"The endpoint at http://{address} cannot be reached" in called.said) == (1, True)


def test_a_key_is_sent_from_the_environment(
    file: Path, call: Call, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-VER-36: or from the option."""
    keys = KeyFile(records)
    key = make_key(keys, "ann")["authorization"].removeprefix("Bearer ")
    weak = make_key(keys, "bob", rights=[Right.READ])["authorization"].removeprefix("Bearer ")
    with served_app(build_api(driven(loaded(file)), callers=CallerCache(keys, KeyPolicy.REQUIRED))) as url:
        assert "A key is needed" in call("drain", "--url", url).said
        monkeypatch.setenv(options.KEY_VARIABLE, weak)
        assert "lacks the right 'admin'" in call("drain", "--url", url).said
        assert call("drain", "--url", url, "--key", key).code == 0


def test_the_webhooks_of_a_run_are_listed_and_sent_again(call: Call) -> None:
    """S-HOK-14: with the state and the last attempt; an unknown run or delivery is exit code 2."""
    team = Ensemble(tasks=[task("say", handler=lambda _: "done")])
    with Receiver() as receiver, served_app(build_api(driven(team, webhooks=rules()))) as url:
        receiver.statuses.append(410)
        client = endpoint.EndpointClient(url, None)
        client.ask("POST", "/runs?wait=60", {"run_id": "none"})
        assert "has no webhooks" in call("deliveries", "none", "--url", url).said
        client.ask("POST", "/runs?wait=60", {"run_id": "first", "webhook": {"url": receiver.origin}})
        (sent,) = receiver.wait(1)
        until(lambda: client.ask("GET", "/runs/first/deliveries")["deliveries"][0]["state"] == "failed", "a failure")
        listed = call("deliveries", "first", "--url", url).printed.splitlines()
        assert listed[1].split()[:5] == [sent.delivery_id, "run.ended", receiver.origin, "failed", "1"]
        assert listed[1].endswith("HTTP 410")
        again = call("deliveries", "first", "--redeliver", sent.delivery_id, "--url", url)
        assert (again.code, again.printed.splitlines()[1].split()[3]) == (0, "pending")
        receiver.wait(2)
        until(lambda: client.ask("GET", "/runs/first/deliveries")["deliveries"][0]["state"] == "delivered", "delivery")
        (shown,) = json.loads(call("deliveries", "first", "--url", url, "--json").printed)
        for arguments, words in ((("other",), "There is no run"), (("first", "--redeliver", "x"), "no delivery")):
            refused = call("deliveries", *arguments, "--url", url)
            assert (refused.code, words in refused.said) == (2, True), refused.said
    assert (shown["attempt_count"], shown["state"]) == (2, "delivered")


def test_the_usage_of_keys_is_shown_to_an_administrator(call: Call, records: Path) -> None:
    """S-QUO-5, S-QUO-31: of all keys; another key sees its own."""
    team = Ensemble(tasks=[task("say", handler=lambda _: "done")])
    runs, callers, keys = standing_callers(records, team, KeyPolicy.REQUIRED)
    ann = make_key(keys, "ann", rights=[Right.RUN], quotas=["runs=5/day"])["authorization"].removeprefix("Bearer ")
    admin = make_key(keys, "root")["authorization"].removeprefix("Bearer ")
    with served_app(build_api(runs, callers=callers)) as url:
        endpoint.EndpointClient(url, ann).ask("POST", "/runs", {"run_id": "first"})
        endpoint.EndpointClient(url, admin).ask("POST", "/runs?wait=60", {"run_id": "first"})
        head, *rows = [
            line.split("  ") for line in call("keys", "usage", "--url", url, "--key", admin).printed.splitlines()
        ]
        (own,) = json.loads(call("keys", "usage", "--url", url, "--key", ann, "--json").printed)
    assert [each.strip() for each in head if each] == ["key", "day", "runs", "tokens", "cost"]
    shown = {row[0].strip(): [each.strip() for each in row if each][2:] for row in rows}
    assert shown == {"ann": ["1 of 5", "0", "0"], "root": ["0", "0", "0"]}
    assert own["key"] == "ann"


def test_an_endpoint_without_keys_has_no_usage(url: str, call: Call) -> None:
    """S-QUO-5."""
    assert "no keys" in call("keys", "usage", "--url", url).said
