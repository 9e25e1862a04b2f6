"""Examples in docstrings run: what `>>>` shows is what is printed."""

import doctest
import importlib

from tests.architecture.project import module_names


def test_examples_in_docstrings_are_true() -> None:
    """Every module of the core; examples that would need a network or Ray are not written as `>>>`."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    for name in module_names("ensemble_ray"):
        for example in finder.find(importlib.import_module(name), name):
            runner.run(example, out=report.append)
    assert runner.tries > 10
    assert runner.failures == 0, "".join(report)
