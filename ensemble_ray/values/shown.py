"""Values that people print: their text and one line of figures. Layer: above value."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Protocol, Self

from ensemble_ray.values.value import Value

if TYPE_CHECKING:
    from datetime import timedelta

__all__ = ["Shown", "count", "figures"]


class _Printer(Protocol):
    """The part of IPython's printer that is used here."""

    def text(self, text: str) -> None: ...


class Shown(Value):
    """A value that people print: its text and one line of figures instead of all its fields."""

    if not TYPE_CHECKING:

        def __class_getitem__(cls, parsed: object) -> type[Self]:
            """Return the class: to type checkers alone it is one per type of answer."""
            return cls

    def text_and_figures(self) -> tuple[str, str]:
        """Return the text, and the line of figures without its brackets."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the text, and below it one line of figures."""
        text, line = self.text_and_figures()
        return f"{text}\n[{line}]" if text else f"[{line}]"

    def __repr__(self) -> str:
        """Return one line: the class, the beginning of the text, the figures."""
        text, line = self.text_and_figures()
        return f"<{type(self).__name__} {reprlib.repr(text)}: {line}>"

    def _repr_pretty_(self, printer: _Printer, cycle: bool) -> None:  # noqa: ARG002, FBT001  IPython's signature
        """Show it in a notebook as `print` does."""
        printer.text(str(self))


def figures(tasks: int | None, model_calls: int, tokens: int, duration: timedelta) -> str:
    """Return one line of figures; tasks that are None and tokens that are unknown are left out."""
    parts = [] if tasks is None else [count(tasks, "task")]
    parts.append(count(model_calls, "model call"))
    if tokens >= 0:
        parts.append(count(tokens, "token"))
    return ", ".join((*parts, f"{duration.total_seconds():.1f} s"))


def count(number: int, noun: str) -> str:
    """Return the number with its noun, `1 task` or `1,000 tasks`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
