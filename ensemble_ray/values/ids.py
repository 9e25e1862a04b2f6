"""Names of things. Pure; the only randomness is `new_run_id` and `new_object_id`.

Three identities (design of the record):
- the hidden object id of a definition: look-up inside a process, never recorded;
- the task key: a task's name, or its ordinal in the plan;
- the instance: a path of `key#occurrence`; an effect's name is `instance/turn/call`.
"""

from __future__ import annotations

import hashlib
import os
import uuid

#: The name of facts about a run as a whole.
RUN = "run"
#: Key of work that was handed on, inside the call that did so.
_DELEGATE = "delegate"
#: Before the key of a task whose output is reflected on when the task has ended.
_REFLECT = "reflect:"
#: The digit that tells a UUID's variant: two bits of it are fixed.
_VARIANTS = {digit: "89ab"[int(digit, 16) % 4] for digit in "0123456789abcdef"}


def new_object_id() -> str:
    """Return a fresh hidden id for a definition (S-CONV-30)."""
    return os.urandom(16).hex()


def new_run_id() -> str:
    """Return a fresh run id: a random UUID (S-ENG-2); the only random name that reaches the record."""
    return str(uuid.uuid4())


def uuid_of(name: str) -> str:
    """Return the id of a named thing: the SHA-256 of its name in version-4 form, so that a re-run finds it again."""
    digits = hashlib.sha256(name.encode()).hexdigest()
    variant = _VARIANTS[digits[16]]
    # Put together here: each task asks for one, and a `UUID` would be made to be turned into a text again.
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:32]}"


def instance_of(key: str, *, occurrence: int = 0, parent: str = "") -> str:
    """Return the instance of a task key: `parent/key#occurrence`."""
    here = f"{key}#{occurrence}"
    return f"{parent}/{here}" if parent else here


def key_of(instance: str) -> str:
    """Return the key of an instance without its occurrence, with the path before it.

    Examples:
        >>> key_of("facts#0")
        'facts'
    """
    return instance.rpartition("#")[0]


def delegated_instance(effect: str) -> str:
    """Return the instance of the work that a call hands to another agent: `facts#0/2/call-1/delegate#0`."""
    return instance_of(_DELEGATE, parent=effect)


def node_key(instance: str) -> str:
    """Return the key of the task or unit that an instance is an execution of, without the path before it.

    Examples:
        >>> node_key("loop:refine#2/writer#0")
        'writer'
    """
    return instance.rpartition("/")[2].rpartition("#")[0]


def reflecting_instance(instance: str) -> str:
    """Return the instance of reflecting on the output of an instance, where that is done behind its task.

    Examples:
        >>> reflecting_instance("phase:draft#1/writer#0")
        'phase:draft#1/reflect:writer#0'
    """
    parent, slash, own = instance.rpartition("/")
    return f"{parent}{slash}{_REFLECT}{own}"


def reflected_instance(instance: str) -> str:
    """Return whose output an instance that `reflecting_instance` gave reflects on."""
    parent, slash, own = instance.rpartition("/")
    return f"{parent}{slash}{own.removeprefix(_REFLECT)}"


def delegating_call(instance: str) -> str | None:
    """Return the call that handed on the work of an instance, `facts#0/2/call-1`; None for a task of the plan.

    A call is no execution of anything, so that a task of that key inside a loop is told apart.
    """
    call = instance.rpartition(f"/{_DELEGATE}#")[0]
    return None if "#" in call.rpartition("/")[2] else call or None


def is_inside_unit(instance: str) -> bool:
    """Whether an instance is an execution of a task of the plan inside of a loop, a phase or a graph.

    Examples:
        >>> is_inside_unit("loop:refine#2/writer#0"), is_inside_unit("writer#0/0/call-1/delegate#0")
        (True, False)
    """
    return "/" in instance and delegating_call(instance) is None


def task_instance(name: str) -> str:
    """Return the instance of the plan's task that an instance or an effect belongs to, however deep it was handed on.

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


def effect_name(instance: str, turn: int, call: str | int = "model") -> str:
    """Return the name of one effect: what was done in which turn of which instance."""
    return f"{instance}/{turn}/{call}"


#: How often a digit can be raised.
MOST_RESENDS = 9
#: How deep delegations have a digit of their own: as deep as they go by default.
_DIGITS = 3
#: A task of the plan that lost its process is handed out again by the scheduler.
REDISPATCH_STEP = 10**_DIGITS
#: A new owner of a run begins above everything that is recorded, and above what the one before may have handed out since.
OWNER_STEP = 10 * REDISPATCH_STEP


def resend_step(depth: int) -> int:
    """How far above the one before it stands a delegation that is sent again.

    Args:
        depth: Of the delegated work; 1 where a task of the plan asks for it.

    Examples:
        >>> [resend_step(depth) for depth in (1, 2, 3, 4)]
        [100, 10, 1, 1]
    """
    step: int = 10 ** max(0, _DIGITS - depth)
    return step
