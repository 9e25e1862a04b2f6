"""Texts that shall be no templates. Package: definition. What fills in the variables of those that are is in `plan`."""

from __future__ import annotations

import re

__all__ = ["escape_template", "unescape_template"]

_IN_BRACES = re.compile(r"\{(\w+)\}")
_ESCAPED = re.compile(r"\{\{(\w+)\}\}")


def escape_template(text: str) -> str:
    """Return the template that resolves to that very text, whatever stands in its braces.

    Examples:
        >>> escape_template("{a} of {1, 2}")
        '{{a}} of {1, 2}'
    """
    return _IN_BRACES.sub(r"{{\1}}", text) if "{" in text else text


def unescape_template(template: str) -> str:
    """Return the text that `escape_template` was given.

    Examples:
        >>> unescape_template("{{a}} of {1, 2}")
        '{a} of {1, 2}'
    """
    return _ESCAPED.sub(r"{\1}", template) if "{" in template else template
