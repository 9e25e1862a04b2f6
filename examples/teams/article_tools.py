"""`article.yaml` refers to this module, which is beside it, as `article_tools:...`."""

from __future__ import annotations

from ensemble_ray import GuardrailOutput, GuardrailResult, tool


@tool
def word_count(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


def is_prose(given: GuardrailOutput) -> GuardrailResult:
    if any(line.startswith("#") for line in given.raw_response.splitlines()):
        return GuardrailResult.failure("the article has headings")
    return GuardrailResult.success()
