"""Arithmetic for models. Package: built-in tools. In: one expression as text; out: its value as text.

The grammar is the specification's, and so is its parser: nothing is ever handed to `eval` (S-BIT-1). Two stacks stand
for the recursion of a grammar, so that no input, however nested, can exhaust Python's own stack (S-BIT-7). Arithmetic
never raises but for the two divisions by zero: an overflow is `Infinity`, an impossible power is `NaN` (S-BIT-6).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from ensemble_ray.tools.tool import AbstractAgentTool, ToolResult

__all__ = ["CalculatorTool", "calculate"]

_MAX_CHARACTERS = 10_000
_MAX_DEPTH = 200
#: a whole result below this prints without a fraction (S-BIT-3)
_WHOLE_BELOW = 1e15

_NUMBER = re.compile(r"[0-9.]+")
_WELL_FORMED_NUMBER = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+")


class CalculatorTool(AbstractAgentTool):
    """Evaluates an arithmetic expression: `+ - * / % ^`, parentheses, decimals."""

    name = "calculator"
    effect = "none"
    description = (
        "Evaluates an arithmetic expression and returns its value. Operators: + - * / % (remainder) ^ (power), "
        "parentheses, decimal numbers. Input: the expression alone, for example (2 + 3) * 4 ^ 2"
    )

    def do_execute(self, text: str, /) -> ToolResult:
        """Give the value of the expression, or why there is none."""
        try:
            return ToolResult.success(calculate(text))
        except ValueError as error:
            return ToolResult.failure(str(error))


def calculate(expression: str | None) -> str:
    """Return the value of an arithmetic expression, as text.

    Raises:
        ValueError: the expression is blank, not of the grammar, or divides by zero; the text says which (S-BIT-5).
    """
    if expression is None or not expression.strip():
        raise ValueError("Expression must not be blank")
    if len(expression) > _MAX_CHARACTERS:
        raise _invalid(f"longer than {_MAX_CHARACTERS} characters")
    return _text_of(_Evaluation(expression).value())


def _invalid(reason: str) -> ValueError:
    return ValueError(f"Invalid expression: {reason}")


def _text_of(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if value.is_integer() and abs(value) < _WHOLE_BELOW:
        return str(int(value))
    return repr(value)


def _divide(left: float, right: float) -> float:
    if right == 0:
        raise ValueError("Division by zero")
    return left / right


def _remainder(left: float, right: float) -> float:
    """Return the remainder with the sign of the dividend (S-BIT-4)."""
    if right == 0:
        raise ValueError("Modulo by zero")
    return math.nan if math.isinf(left) else math.fmod(left, right)


def _power(base: float, exponent: float) -> float:
    try:
        return math.pow(base, exponent)
    except OverflowError:
        return -math.inf if base < 0 and _is_odd(exponent) else math.inf
    except ValueError:
        # the only two domain errors: a negative base with a broken exponent, and zero with a negative one
        if base != 0:
            return math.nan
        return math.copysign(math.inf, base) if _is_odd(exponent) else math.inf


def _is_odd(value: float) -> bool:
    return abs(math.fmod(value, 2)) == 1


#: sign -> (binding power, value); all but `^` are left-associative
_BINARY: Mapping[str, tuple[int, Callable[[float, float], float]]] = {
    "+": (1, lambda left, right: left + right),
    "-": (1, lambda left, right: left - right),
    "*": (2, lambda left, right: left * right),
    "/": (2, _divide),
    "%": (2, _remainder),
    "^": (4, _power),
}
#: how strongly a sign before an operand binds: over `*`, under `^`, so that -2^2 is -4 (S-BIT-2)
_PREFIX_POWER = 3
_OPEN = "("
_NEGATE = "negate"


class _Evaluation:
    """One pass over an expression: operands and pending operators on two stacks."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._operands: list[float] = []
        self._pending: list[str] = []
        self._depth = 0

    def value(self) -> float:
        """Return the value of the whole text."""
        while True:
            self._read_operand()
            self._close_parentheses()
            sign = self._peek()
            if sign == "":
                break
            if sign not in _BINARY:
                raise _invalid(f"unexpected character '{sign}' at position {self._at}")
            self._at += 1
            self._push(sign)
        if self._depth:
            raise _invalid("missing closing parenthesis")
        self._reduce(0)
        return self._operands[0]

    def _peek(self) -> str:
        """Return the next character that is not white space; empty at the end."""
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _read_operand(self) -> None:
        """Read signs and opening parentheses up to a number."""
        while True:
            sign = self._peek()
            if sign == "":
                raise _invalid("unexpected end of expression")
            if number := _NUMBER.match(self._text, self._at):
                self._at = number.end()
                self._operands.append(_number_of(number.group()))
                return
            if sign == _OPEN:
                self._depth += 1
                if self._depth > _MAX_DEPTH:
                    raise _invalid(f"nested deeper than {_MAX_DEPTH} levels")
                self._pending.append(_OPEN)
            elif sign == "-":
                self._pending.append(_NEGATE)
            elif sign != "+":
                raise _invalid(f"unexpected character '{sign}' at position {self._at}")
            self._at += 1

    def _close_parentheses(self) -> None:
        while self._peek() == ")" and self._depth:
            self._at += 1
            self._depth -= 1
            self._reduce(0)
            self._pending.pop()

    def _push(self, sign: str) -> None:
        power, _ = _BINARY[sign]
        # `^` waits for the one to its right: 2^3^2 is 2^9
        self._reduce(power + 1 if sign == "^" else power)
        self._pending.append(sign)

    def _reduce(self, least_power: int) -> None:
        """Carry out what is pending down to the open parenthesis and binds at least that strongly."""
        while self._pending and self._pending[-1] != _OPEN:
            sign = self._pending[-1]
            if (_PREFIX_POWER if sign == _NEGATE else _BINARY[sign][0]) < least_power:
                return
            self._pending.pop()
            right = self._operands.pop()
            if sign == _NEGATE:
                self._operands.append(-right)
            else:
                self._operands.append(_BINARY[sign][1](self._operands.pop(), right))


def _number_of(digits: str) -> float:
    if not _WELL_FORMED_NUMBER.fullmatch(digits):
        raise _invalid(f"invalid number '{digits}'")
    return float(digits)
