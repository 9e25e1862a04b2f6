"""CalculatorTool: grammar, precedence, printing, and every way in which an expression can be wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ray import CalculatorTool
from ensemble_ray.tools.builtin.offline import calculate
from tests.ensemble_ray.tools.builtin.travel import travelled


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2", "3"),
        ("7 - 10", "-3"),
        ("6 * 7", "42"),
        ("6 / 2", "3"),
        ("7 % 4", "3"),
        ("2 ^ 10", "1024"),
        ("(1 + 2) * 3", "9"),
        ("+5", "5"),
        ("-(2 + 3)", "-5"),
        ("--2", "2"),
        ("2 * -3", "-6"),
        (".5 + 5.", "5.5"),
        (" \t1\n+ 1 ", "2"),
    ],
)
def test_value_is_given_when_expression_is_of_the_grammar(expression: str, value: str) -> None:
    """S-BIT-1."""
    assert CalculatorTool().execute(expression).output == value


@pytest.mark.parametrize("expression", ["2 ** 3", "7 // 2", "1e3", "pi", "abs(2)", "1,5", "1; 2", "__import__('os')"])
def test_expression_is_refused_when_it_is_more_than_arithmetic(expression: str) -> None:
    """S-BIT-1."""
    result = CalculatorTool().execute(expression)
    assert not result.is_success
    assert str(result.error_message).startswith("Invalid expression: unexpected character")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("10 - 3 - 2", "5"),
        ("8 / 4 / 2", "1"),
        ("7 % 4 * 2", "6"),
        ("-2^2", "-4"),
        ("(-2)^2", "4"),
        ("2^-1", "0.5"),
        ("2^3^2", "512"),
        ("2^-2^2", "0.0625"),
        ("2^-1 * 3", "1.5"),
        ("-2 * 3", "-6"),
    ],
)
def test_operators_bind_as_specified_when_mixed(expression: str, value: str) -> None:
    """S-BIT-2."""
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("6 / 2", "3"),
        ("0.1 + 0.2", "0.30000000000000004"),
        ("10^15", "1000000000000000.0"),
        ("10^15 - 1", "999999999999999"),
        ("-(10^15)", "-1000000000000000.0"),
        ("1 / 4", "0.25"),
        ("-0", "0"),
        ("0 * -1", "0"),
    ],
)
def test_numbers_print_as_specified_when_whole_or_broken(expression: str, text: str) -> None:
    """S-BIT-3."""
    assert calculate(expression) == text


def test_remainder_takes_the_sign_of_the_dividend_when_signs_differ() -> None:
    """S-BIT-4."""
    assert (calculate("-7 % 3"), calculate("7 % -3")) == ("-1", "1")


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "Expression must not be blank"),
        (" \n ", "Expression must not be blank"),
        (None, "Expression must not be blank"),
        ("1 / 0", "Division by zero"),
        ("1 / (2 - 2)", "Division by zero"),
        ("5 % 0", "Modulo by zero"),
        ("1 + x", "Invalid expression: unexpected character 'x' at position 4"),
        ("1 2", "Invalid expression: unexpected character '2' at position 2"),
        ("(1))", "Invalid expression: unexpected character ')' at position 3"),
        ("1 +", "Invalid expression: unexpected end of expression"),
        ("(", "Invalid expression: unexpected end of expression"),
        ("(1 + 2", "Invalid expression: missing closing parenthesis"),
        ("1.2.3", "Invalid expression: invalid number '1.2.3'"),
        (".", "Invalid expression: invalid number '.'"),
    ],
)
def test_failure_says_what_is_wrong_when_expression_is_wrong(expression: str, message: str) -> None:
    """S-BIT-5."""
    result = CalculatorTool().execute(expression)
    assert not result.is_success
    assert result.error_message == message


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("10 ^ 999", "Infinity"),
        ("-(10 ^ 999)", "-Infinity"),
        ("(-10) ^ 999", "-Infinity"),
        ("(-10) ^ 998", "Infinity"),
        ("10^300 * 10^300", "Infinity"),
        ("0 ^ -1", "Infinity"),
        ("0 ^ -2", "Infinity"),
        ("(-8) ^ 0.5", "NaN"),
        ("10^999 - 10^999", "NaN"),
        ("10^999 % 2", "NaN"),
        ("9" * 400, "Infinity"),
    ],
)
def test_result_is_infinity_or_nan_when_no_number_fits(expression: str, text: str) -> None:
    """S-BIT-6."""
    assert calculate(expression) == text


def test_expression_is_refused_when_nested_too_deeply_or_too_long() -> None:
    """S-BIT-7: at the limits it is still evaluated, and signs and powers do not count as nesting."""
    assert calculate("(" * 200 + "1" + ")" * 200) == "1"
    assert calculate("-" * 9_998 + "1") == "1"
    assert calculate("+".join(["1"] * 5_000)) == "5000"
    assert calculate("1^" * 4_000 + "1") == "1"
    for expression in ("(" * 201 + "1" + ")" * 201, "1" + " " * 10_000):
        with pytest.raises(ValueError, match=r"^Invalid expression: "):
            calculate(expression)


def test_tower_of_powers_returns_when_its_value_is_beyond_all_numbers() -> None:
    """S-BIT-7."""
    assert calculate("9^9^9^9") == "Infinity"


def test_tool_travels_when_pickled() -> None:
    """S-CONV-34: a built-in tool holds nothing that cannot travel."""
    copy = travelled(CalculatorTool())
    assert (copy.name, copy.execute("2 + 2").output) == ("calculator", "4")


#: all with a point, so that Python's arithmetic is floating too
_NUMBERS = st.one_of(st.integers(0, 999).map("{}.".format), st.integers(0, 9999).map(lambda n: f"{n / 100:.2f}"))
_EXPRESSIONS = st.recursive(
    _NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(" ".join),
        inner.map("({})".format),
        inner.map("-({})".format),
    ),
    max_leaves=12,
)


@settings(max_examples=60)
@given(_EXPRESSIONS)
def test_value_is_what_python_says_when_only_shared_operators_occur(expression: str) -> None:
    """S-BIT-1, S-BIT-2: where both grammars agree, so do the values."""
    try:
        expected = eval(expression, {})  # noqa: S307  made by the strategy above
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="Division by zero"):
            calculate(expression)
        return
    assert float(calculate(expression)) == expected


@settings(max_examples=80)
@given(st.text(alphabet="0123456789.+-*/%^() x", max_size=40))
def test_answer_is_a_value_or_a_reason_when_input_is_anything(expression: str) -> None:
    """S-BIT-5, S-BIT-6: never an exception, never a complex number."""
    result = CalculatorTool().execute(expression)
    if result.is_success:
        float(result.output)
    else:
        assert str(result.error_message).startswith(
            ("Invalid expression: ", "Expression must not", "Division by zero", "Modulo by zero")
        )
