"""What keeps a run from ending before somebody dies in it."""

from __future__ import annotations

import json
import random
import threading
from http.client import HTTPConnection
from urllib.parse import urlsplit

from ensemble_ray.testing import ModelServer, Reply, ServedRequest
from tests.chaos.gate import Gate, all_read
from tests.chaos.moments import ENDING, OWNED, moments
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.victims import VICTIMS

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]})


def ask(server: ModelServer, key: str) -> int:
    """Ask under a key; gives the status of the answer."""
    connection = HTTPConnection(urlsplit(server.base_url).netloc, timeout=90)
    connection.request("POST", "/v1/chat/completions", body=BODY, headers={"Idempotency-Key": key})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def test_answers_are_held_when_so_many_different_requests_have_come() -> None:
    """A repetition is none of them, and after the gate was opened all are answered."""
    gate = Gate()

    def answer(request: ServedRequest) -> Reply:
        gate.note(request)
        return Reply(text="x")

    given: list[int] = []
    with ModelServer(answer) as server:
        with gate.closed(server, most=2):
            assert [ask(server, "a"), ask(server, "a")] == [200, 200]
            caller = threading.Thread(target=lambda: given.append(ask(server, "b")))
            caller.start()
            server.wait_in_flight(1)
            assert all_read(server) > 0
            assert given == []
        caller.join()
        assert [*given, ask(server, "c")] == [200, 200]


def test_every_moment_can_come_when_those_before_it_were_used_to_the_full() -> None:
    """However late somebody is killed, enough requests are left for whoever is killed next."""
    for scenario in SCENARIOS.values():
        for seed in range(200):
            chosen = moments(scenario, [VICTIMS["process"]], 3, random.Random(seed))  # noqa: S311  repeatable
            for moment, following in zip(chosen, [*chosen[1:], None], strict=True):
                assert (moment.most is None) is (moment.kind == ENDING)
                if moment.most is not None and following is not None and following.most is not None:
                    needed = 0 if following.kind == OWNED else following.more
                    assert moment.most + needed < following.most < scenario.calls
