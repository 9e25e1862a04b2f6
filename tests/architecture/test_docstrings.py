"""Examples in docstrings run: what `>>>` shows is what is printed."""

import doctest
import importlib

from tests.architecture.project import ROOT, python_files


def test_examples_in_docstrings_are_true() -> None:
    """Every module of the core; examples that would need a network or Ray are not written as `>>>`."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    for path in python_files("ensemble_ray"):
        if ">>>" not in path.read_text(encoding="utf-8"):
            continue  # most have none, and looking for them one by one takes long
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for example in finder.find(importlib.import_module(name), name):
            runner.run(example, out=report.append)
    assert runner.tries > 10
    assert runner.failures == 0, "".join(report)
