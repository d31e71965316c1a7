"""Prints findings for continuous integration, as GitHub annotations or JUnit XML.

Each checkpoint is a test case. A failed case has findings; a case with an error could not be read.
GitHub shows only ten annotations of a workflow step. So only the first findings of each checkpoint
are printed, and then how many follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from ..errors import counted, safe
from .findings import findings_of

Report = Mapping[str, Any]
MOST = 8  # annotations per checkpoint: GitHub shows ten per step
XML_1_0 = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "\ufffe": "?", "\uffff": "?"}
)
"""The replacements for XML. `xml.sax` would import urllib: 5 MB and a third of the start time."""


class Finding(Struct, frozen=True):
    """One sentence of a report, for CI, with its code and the file that it is about.

    It is about a fault or a warning. docs/codes.md lists the codes. The file is None if the
    sentence is not about one.
    """

    code: str
    text: str
    file: str | None = None


class Case(Struct, frozen=True):
    """A checkpoint in a CI report, with its findings and warnings.

    If `is_error`, it could not be read.
    """

    name: str
    findings: list[Finding]
    warnings: list[Finding]
    is_error: bool = False
    seconds: float = 0.0


def annotated(command: str, reports: Sequence[Report], form: str) -> None:
    """Prints reports of `verify`, `check` or `list` for continuous integration.

    `form` is "github" or "junit".
    """
    cases = [case for report in reports for case in _cases(command, report)]
    for line in (_github if form == "github" else _junit)(command, cases):
        print(line)


def _cases(command: str, report: Report) -> Iterator[Case]:
    if "error" in report:
        yield Case(report["path"], [_finding(report)], [], is_error=True)
        return
    yield from CASES[command](report)


def _of_verify(report: Report) -> Iterator[Case]:
    findings = [_finding(line) for line in (*report["problems"], *report.get("unproven", ()))]
    for line in report["differences"]:
        count = f" in {counted(line['count'], 'element')}" if line.get("count") else ""
        findings.append(Finding("tensor-differs", f"{line['tensor']} differs{count}"))
    rest = findings_of({**report, "problems": [], "unproven": [], "differences": []})
    findings += [Finding("verify", text) for text in rest]
    warnings = [_finding(line) for line in report.get("warnings", ())]
    yield Case(report["path"], findings, warnings, seconds=report["seconds"])


def _of_check(report: Report) -> Iterator[Case]:
    findings = [_finding(line) for line in report["obstacles"]]
    if findings and report["fix"]:
        findings.append(Finding("check", f"this command makes it fit: {report['fix']}"))
    yield Case(report["path"], findings, [_finding(line) for line in report["warnings"]])


def _of_list(report: Report) -> Iterator[Case]:
    for row in report["checkpoints"]:
        is_wrong = False in (row["whole"], row["of_one_save"], row["intact"])
        wrong = (*row["problems"], *(row["unread"] if is_wrong else ()))
        other_lines = (*row["obstacles"], *row["warnings"], *(() if is_wrong else row["unread"]))
        findings, warnings = [*map(_finding, wrong)], [*map(_finding, other_lines)]
        yield Case(row["path"], findings, warnings, is_error=bool(wrong) and not is_wrong)


CASES: dict[str, Callable[[Report], Iterator[Case]]] = {
    "verify": _of_verify,
    "check": _of_check,
    "list": _of_list,
}


def _finding(line: Report) -> Finding:
    hint = f" ({line['hint']})" if line.get("hint") else ""
    return Finding(line["code"], f"{line['message']}{hint}", line.get("file"))


def _github(command: str, cases: Sequence[Case]) -> Iterator[str]:
    """Yields GitHub workflow commands, one per finding, and a line per case without findings."""
    for case in cases:
        for level, lines in (("error", case.findings), ("warning", case.warnings)):
            for line in lines[:MOST]:
                where = f",file={_property(line.file)}" if line.file else ""
                title = _property(f"zckpt {command}: {line.code}")
                yield f"::{level} title={title}{where}::{_data(f'{case.name}: {line.text}')}"
            if (more := len(lines) - MOST) > 0:
                yield f"::{level} title=zckpt {command}::{_data(case.name)}: and {more:,} more"
        if not case.findings:
            yield f"{safe(case.name)}: ok"


def _data(text: str) -> str:
    return safe(text).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _junit(command: str, cases: Sequence[Case]) -> Iterator[str]:
    """Yields the lines of a JUnit XML file: a test suite with a test case per checkpoint."""
    errors = sum(case.is_error for case in cases)
    failures = sum(bool(case.findings) and not case.is_error for case in cases)
    seconds = sum(case.seconds for case in cases)
    counts = f'tests="{len(cases)}" failures="{failures}" errors="{errors}" time="{seconds:.3f}"'
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield f"<testsuites {counts}>"
    yield f'<testsuite name="zckpt {command}" {counts}>'
    for case in cases:
        name = _attribute(case.name)
        yield f'<testcase classname="zckpt.{command}" name={name} time="{case.seconds:.3f}">'
        if case.findings:
            kind = "error" if case.is_error else "failure"
            first, text = case.findings[0], "\n".join(_lines(case.findings))
            message = _attribute(first.text)
            yield f"<{kind} type={_attribute(first.code)} message={message}>{text}</{kind}>"
        if case.warnings:
            yield "<system-out>" + "\n".join(_lines(case.warnings)) + "</system-out>"
        yield "</testcase>"
    yield "</testsuite>"
    yield "</testsuites>"


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    for line in findings:
        yield safe(f"{line.code}: {line.text}").translate(XML_1_0)


def _attribute(text: str) -> str:
    return f'"{safe(text).translate(XML_1_0)}"'
