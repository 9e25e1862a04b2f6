"""Variables in task texts: `{name}`. Package: plan. Pure but for DEBUG lines.

Rules: one pass, so a value that looks like a variable stays what it is (S-TPL-7); `{{name}}` is the text `{name}`
(S-TPL-2); braces around anything but a name are text (S-TPL-1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import overload

from ensemble_ray.errors import PromptTemplateError
from ensemble_ray.process.bounded_log import bounded_logger

__all__ = ["resolve_template"]

_log = bounded_logger(__name__)
_VARIABLE = re.compile(r"\{\{(?P<escaped>\w+)\}\}|\{(?P<name>\w+)\}")
#: How much of a template an error shows (S-TPL-6).
_SHOWN = 100


@overload
def resolve_template(template: str, inputs: Mapping[str, object] | None) -> str: ...
@overload
def resolve_template(template: None, inputs: Mapping[str, object] | None) -> None: ...
def resolve_template(template: str | None, inputs: Mapping[str, object] | None) -> str | None:
    """Put values in the places of variables.

    Args:
        template: Text with variables; None and blank texts are given back unchanged.
        inputs: Values by name; None is no values, a value None is "", other values become text with `str`.

    Raises:
        PromptTemplateError: variables without a value, all of them, in the order of their first appearance.
    """
    # Most texts have no variable: they must cost nothing.
    if template is None or "{" not in template:
        return template
    values = inputs or {}
    missing: dict[str, None] = {}
    count = 0

    def fill(found: re.Match[str]) -> str:
        nonlocal count
        escaped = found["escaped"]
        if escaped is not None:
            return f"{{{escaped}}}"
        name = found["name"]
        if name not in values:
            missing[name] = None
            return ""
        count += 1
        value = values[name]
        return "" if value is None else str(value)

    _log.debug("Resolving a template of %d characters with %d inputs", len(template), len(values))
    resolved = _VARIABLE.sub(fill, template)
    if missing:
        shown = template if len(template) <= _SHOWN else template[:_SHOWN] + "..."
        raise PromptTemplateError(
            f"Missing template variables: [{', '.join(missing)}]. Provide them in ensemble.run(inputs). "
            f"Template: '{shown}'",
            tuple(missing),
            template,
        )
    _log.debug("Resolved a template: %d variables", count)
    return resolved
