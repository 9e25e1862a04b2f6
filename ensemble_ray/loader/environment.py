"""Environment variables in a team file: `${NAME}` and `${NAME:-default}`. Package: loader. Pure over a given environment.

In: the text of a value, and where it stands. Out: the text with the values of variables. Never: a variable in a text that
is a template, names code, or may hold a key, nor one that makes more of a text than a text or a number (S-SET-58).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["expand", "may_be_secret", "takes_variables"]

#: `[^{}]`, so that each text is read once, whatever it opens and never closes.
_VARIABLE = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^{}]*))?\}")
_INDEX = re.compile(r"\[\d+\]")
#: Below these keys everything takes variables but what may be secret.
_SECTIONS = frozenset({"llm", "manager_llm", "models", "inputs"})
#: And these values, wherever they stand: who agents are, files, folders, addresses, numbers.
_KEYS = frozenset({
    "role", "goal", "background", "items", "results", "dead_letters", "directory", "base_directory", "url",
    "max_tokens", "max_cost", "max_parallel_tasks", "max_concurrency", "replicas", "max_iterations", "max_steps",
    "num_cpus", "num_gpus", "max_retries", "max_predecessor_retries",
})  # fmt: skip
_SECRET = frozenset({"api_key", "api_key_env", "headers", "extra_headers", "extra_query", "env"})


def takes_variables(where: str) -> bool:
    """Return whether the value at a path, such as `llm.base_url`, takes variables."""
    path = _INDEX.sub("", where).split(".")
    return path[-1] in _KEYS or not _SECTIONS.isdisjoint(path)


def may_be_secret(where: str) -> bool:
    """Return whether the value at a path may hold a key; those come from the environment in another way."""
    return not _SECRET.isdisjoint(_INDEX.sub("", where).split("."))


def expand(text: str, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """Put values in the places of variables.

    Args:
        text: With `${NAME}`, `${NAME:-default}` for a variable that is not set or empty, and `$${` for a literal `${`.
        environ: Values by name.

    Returns:
        The text, and the names of variables that are not set and have no default, each once.

    Examples:
        >>> expand("openai:${MODEL:-small} at ${HOST}, $${HOST}", {"HOST": "here"})
        ('openai:small at here, ${HOST}', [])
    """
    missing: dict[str, None] = {}

    def value_of(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        if name is None:
            return "${"
        value = environ.get(name)
        if default is not None:
            return value or default
        if value is None:
            missing[name] = None
            return ""
        return value

    return _VARIABLE.sub(value_of, text), list(missing)
