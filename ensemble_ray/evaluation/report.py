"""Results of evaluations for programs: JSON, JUnit XML, and the outcome that decides an exit code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from xml.etree import ElementTree as ET

import msgspec
from msgspec import Struct

from ensemble_ray.evaluation.results import COMPLETED, CaseResult, EvaluationComparison, EvaluationResult, RunScore

#: Characters that XML 1.0 cannot contain.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class EvaluationOutcome(Struct, frozen=True, kw_only=True):
    """A result, its minimums and its comparison: they decide the exit code."""

    result: EvaluationResult
    comparison: EvaluationComparison | None = None
    minimum: Mapping[str, float] = {}

    @property
    def failures(self) -> list[str]:
        """One line per missed minimum, and per scorer that is significantly worse than before."""
        compared = self.comparison
        worse = [] if compared is None else [each for each in compared.scores if each.is_worse]
        return [
            *self.result.missed(self.minimum),
            *(
                f"{each.scorer}: {each.later:.3f} is significantly worse than {each.earlier:.3f} (p = {each.p_value:.3f})"
                for each in worse
            ),
        ]

    @property
    def has_errors(self) -> bool:
        """Whether a run has no output, or a scorer failed."""
        return next(self.result.errors(), None) is not None

    def to_data(self) -> dict[str, object]:
        """Return the result, its summaries and the comparison as JSON data."""
        result = self.result

        def summarize(tag: str | None) -> dict[str, object]:
            scores = {scorer: msgspec.to_builtins(result.summary(scorer, tag)) for scorer in result.scorers}
            return {"scores": scores, "usage": msgspec.to_builtins(result.usage(tag))}

        return {
            **summarize(None),
            "tags": {tag: summarize(tag) for tag in result.tags},
            "failures": self.failures,
            "comparison": msgspec.to_builtins(self.comparison),
            "result": msgspec.to_builtins(result),
        }

    def junit(self) -> str:
        """Return JUnit XML: a test for each case, which fails only by errors, and a test for each minimum and comparison."""
        result = self.result
        root = ET.Element("testsuites", name=_xml(f"evaluation {result.id}"))
        cases = ET.SubElement(root, "testsuite", name="cases")
        for case in result.cases:
            _add_case(cases, result, case)
        checks = ET.SubElement(root, "testsuite", name="checks")
        missed = {each.partition(":")[0]: each for each in result.missed(self.minimum)}
        for scorer, least in self.minimum.items():
            test = ET.SubElement(checks, "testcase", name=_xml(f"{scorer} >= {least:g}"), classname=_xml(result.team))
            if scorer in missed:
                ET.SubElement(test, "failure", message=_xml(missed[scorer]))
        for each in () if self.comparison is None else self.comparison.scores:
            name = _xml(f"{each.scorer} is not worse than in {self.comparison.earlier if self.comparison else ''}")
            test = ET.SubElement(checks, "testcase", name=name, classname=_xml(result.team))
            if each.is_worse:
                lines = [f"{change.case}: {change.earlier:.3f} -> {change.later:.3f}" for change in each.regressions]
                text = f"{each.later:.3f} after {each.earlier:.3f}, p = {each.p_value:.3f}"
                ET.SubElement(test, "failure", message=_xml(text)).text = _xml("\n".join(lines))
        for suite in (cases, checks):
            suite.set("tests", str(len(suite)))
            suite.set("failures", str(len(suite.findall("testcase/failure"))))
            suite.set("errors", str(len(suite.findall("testcase/error"))))
        ET.indent(root)
        return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_case(suite: ET.Element, result: EvaluationResult, case: CaseResult) -> None:
    took_s = sum(run.duration_s or 0 for run in case.runs)
    test = ET.SubElement(suite, "testcase", name=_xml(case.id), classname=_xml(result.team), time=f"{took_s:.3f}")
    lines, problems = list[str](), list[str]()
    for run in case.runs:
        if run.state != COMPLETED:
            problems.append(f"run {run.run_id}: {run.error or run.state}")
        for name, score in run.scores.items():
            if score.value is None:
                problems.append(f"run {run.run_id}: scorer '{name}': {score.error}")
        scores = ", ".join(f"{name} {shown_score(score)}" for name, score in run.scores.items())
        lines.append(f"run {run.run_id}: {scores or run.state}")
    if problems:
        ET.SubElement(test, "error", message=_xml(problems[0])).text = _xml("\n".join(problems))
    ET.SubElement(test, "system-out").text = _xml("\n".join(lines))


def shown_score(score: RunScore) -> str:
    if score.value is None:
        return "error"
    return f"{score.value:.2f}" + (f" ({score.reason})" if score.reason else "")


def _xml(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
