"""The program that a local Ray starts for each worker instead of `default_worker.py` (docs/decisions/0014-worker-template.md).

It asks the template to fork the worker, or becomes Ray's own program. It imports only the standard library.
"""

import os
import sys

#: In the directory of a session.
DIRECTORY = "template"
SOCKET = "socket"


def main() -> None:
    if not is_forked(sys.argv[1:]):
        become_worker()


def is_forked(arguments: list[str]) -> bool:
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    # A worker with a runtime environment may have another interpreter, container or import path.
    is_usual = options.get("--runtime-env-hash", "0") == "0" and options.get("--worker-type", "WORKER") == "WORKER"
    if not is_usual or "--raylet-name" not in options:
        return False
    session = os.path.dirname(os.path.dirname(options["--raylet-name"]))
    try:
        return _request(os.path.join(session, DIRECTORY, SOCKET), arguments)
    except OSError:  # no template, or it ended
        return False


def _request(address: str, arguments: list[str]) -> bool:
    import marshal  # built in, so that a worker does not wait for the import of a serializer
    import socket
    import struct

    own_directory = os.path.dirname(os.path.abspath(__file__))
    body = marshal.dumps(
        (
            arguments,
            dict(os.environ),
            os.getcwd(),
            [entry for entry in sys.path if entry != own_directory],
            os.getpriority(os.PRIO_PROCESS, 0),
        )
    )
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():  # other users may be able to change the directory of a session
            return False
        socket.send_fds(connection, [len(body).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(body)
        return connection.recv(1) == b"y"


def become_worker() -> None:
    from importlib.util import find_spec

    ray = find_spec("ray")
    assert ray is not None, "Ray runs this program"  # noqa: S101  for the type
    assert ray.submodule_search_locations is not None, "it is a package"  # noqa: S101
    program = os.path.join(next(iter(ray.submodule_search_locations)), "_private", "workers", "default_worker.py")
    flags = [flag for flag, is_set in (("-S", sys.flags.no_site), ("-s", sys.flags.no_user_site)) if is_set]
    os.execv(sys.executable, [sys.executable, *flags, program, *sys.argv[1:]])  # noqa: S606  Ray's own program


if __name__ == "__main__":
    main()
