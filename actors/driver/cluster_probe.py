"""Describes a cluster for a server, since a connected process may die with its cluster (S-CLU-104).

`python -m ensemble_ray.actors.driver.cluster_probe ADDRESS` answers each empty line on standard input by a line of JSON,
`{"description": ...}` or `{"error": text}`. It never starts a cluster.
"""

from __future__ import annotations

import json
import os
import sys
from typing import IO

from ensemble_ray.actors.driver.cluster import LOCAL, describe_cluster, join_or_start
from ensemble_ray.errors import message_of
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.values.metrics import dump_cluster


def answer_questions(address: str, questions: IO[bytes], answers: IO[bytes]) -> None:
    for _ in iter(questions.readline, b""):
        answers.write(_answer(address) + b"\n")
        answers.flush()


def _answer(address: str) -> bytes:
    if address == LOCAL:
        return json.dumps({"error": "An address of a cluster that is there is needed, such as 127.0.0.1:6379"}).encode()
    try:
        join_or_start(address, {})
        return b'{"description": ' + dump_cluster(run_blocking(describe_cluster())) + b"}"
    except Exception as error:  # noqa: BLE001  any error is the answer
        return json.dumps({"error": message_of(error)}).encode()


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Ray's output must not mix with the answers
    answer_questions(sys.argv[1], sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
