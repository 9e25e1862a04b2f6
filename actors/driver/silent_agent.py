"""The program that a local Ray without a dashboard starts instead of its dashboard agent.

Ray's own agent costs 3 s of processor time per instance (docs/decisions/0013-local-ray.md). The raylet waits for the ports
of its agent, and ends with it. This program imports only the standard library.
"""

import os
import sys
import time

#: -1: the service is not in use.
_SERVICES = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
_POLL_S = 1.0


def main() -> None:
    raylet = int(os.environ.get("RAY_RAYLET_PID") or os.getppid())
    options = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    for service in _SERVICES:
        path = os.path.join(options["--session-dir"], f"{service}_{options['--node-id']}")
        with open(f"{path}.new", "w", encoding="ascii") as file:
            file.write("-1")
        os.replace(f"{path}.new", path)
    while os.getppid() == raylet:
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
