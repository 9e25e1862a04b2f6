"""The endpoint as `ensemble-ray serve` begins it. Prints its URL when it is ready; arguments: a team file, replicas."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from urllib.request import urlopen

from ensemble_ray.serve.app import EndpointPlace, serve_until_interrupted

place = EndpointPlace(host="127.0.0.1", port=0).check()


def watch() -> None:
    """Say when it is ready, and end it with the harness."""
    for _ in range(1200):
        with suppress(OSError), urlopen(f"{place.url}/readyz", timeout=10) as answer:  # noqa: S310  loopback
            if answer.status == 200:
                break
        time.sleep(0.1)
    else:
        os._exit(1)
    print(place.url, flush=True)
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGINT)


threading.Thread(target=watch, daemon=True).start()
serve_until_interrupted(
    {"teams": sys.argv[1], "replicas": int(sys.argv[2])}, place, name="benchmark", teams=["benchmark"]
)
