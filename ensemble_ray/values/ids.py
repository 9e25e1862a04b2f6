"""Names of runs, tasks and effects.

A task key is a task's name or ordinal, an instance a path of `key#occurrence`, an effect `instance/turn/call`. Object ids
are never recorded.
"""

from __future__ import annotations

import hashlib
import os
import uuid

RUN = "run"  # name of facts about the whole run
_DELEGATE = "delegate"
_REFLECT = "reflect:"
#: Two bits of this digit of a UUID are fixed.
_VARIANTS = {digit: "89ab"[int(digit, 16) % 4] for digit in "0123456789abcdef"}


def new_object_id() -> str:
    return os.urandom(16).hex()


def new_run_id() -> str:
    """Return a random UUID (S-ENG-2). No other random name is recorded."""
    return str(uuid.uuid4())


def uuid_of(name: str) -> str:
    """Return the SHA-256 of a name in the form of a UUID."""
    digits = hashlib.sha256(name.encode()).hexdigest()
    variant = _VARIANTS[digits[16]]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:32]}"


def instance_of(key: str, *, occurrence: int = 0, parent: str = "") -> str:
    here = f"{key}#{occurrence}"
    return f"{parent}/{here}" if parent else here


def key_of(instance: str) -> str:
    """Return an instance without its last occurrence."""
    return instance.rpartition("#")[0]


def node_key(instance: str) -> str:
    """Return the key of an instance's task or unit, without the path before it.

    Examples:
        >>> node_key("loop:refine#2/writer#0")
        'writer'
    """
    return instance.rpartition("/")[2].rpartition("#")[0]


def effect_name(instance: str, turn: int, call: str | int = "model") -> str:
    return f"{instance}/{turn}/{call}"


def delegated_instance(effect: str) -> str:
    """Return the instance of delegated work: `facts#0/2/call-1/delegate#0`."""
    return instance_of(_DELEGATE, parent=effect)


def delegating_call(instance: str) -> str | None:
    """Return the call that delegated an instance, `facts#0/2/call-1`; None for a task of the plan."""
    call = instance.rpartition(f"/{_DELEGATE}#")[0]
    # A `#` before the last part belongs to a task with that key inside a loop.
    return None if "#" in call.rpartition("/")[2] else call or None


def reflecting_instance(instance: str) -> str:
    """Return the instance of the reflection that follows a task.

    Examples:
        >>> reflecting_instance("phase:draft#1/writer#0")
        'phase:draft#1/reflect:writer#0'
    """
    parent, slash, own = instance.rpartition("/")
    return f"{parent}{slash}{_REFLECT}{own}"


def reflected_instance(instance: str) -> str:
    """Return the task's instance of a reflection."""
    parent, slash, own = instance.rpartition("/")
    return f"{parent}{slash}{own.removeprefix(_REFLECT)}"


def is_inside_unit(instance: str) -> bool:
    """Whether an instance is a task of the plan inside a loop, a phase or a graph.

    Examples:
        >>> is_inside_unit("loop:refine#2/writer#0"), is_inside_unit("writer#0/0/call-1/delegate#0")
        (True, False)
    """
    return "/" in instance and delegating_call(instance) is None


def task_instance(name: str) -> str:
    """Return the plan's task that contains an instance or an effect, through all delegations.

    Examples:
        >>> task_instance("facts#0/2/call-1/delegate#0/0/model")
        'facts#0'
        >>> task_instance("loop:refine#2/writer#0/0/model")
        'loop:refine#2/writer#0'
    """
    end = name.find("/")
    while end >= 0:
        after = name.find("/", end + 1)
        if "#" not in name[end + 1 : len(name) if after < 0 else after]:
            return name[:end]
        end = after
    return name


# The highest epoch, a decimal number, wins. Each depth of delegation increments its own digit.

MOST_RESENDS = 9
_DIGITS = 3  # depths with their own digit
REDISPATCH_STEP = 10**_DIGITS  # added at the restart of a task of the plan after the death of its process
OWNER_STEP = 10 * REDISPATCH_STEP  # added by a new owner of a run: it exceeds every epoch of the former owner


def resend_step(depth: int) -> int:
    """Return the increment of the epoch when a delegation is sent again. `depth` is 1 below a task of the plan.

    Examples:
        >>> [resend_step(depth) for depth in (1, 2, 3, 4)]
        [100, 10, 1, 1]
    """
    step: int = 10 ** max(0, _DIGITS - depth)
    return step
