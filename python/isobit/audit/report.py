"""The findings of an audit, its verdict, and the report as text and as a page."""

import html
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

SHOWN = 20  # differences and faults that a report lists
_LONGEST = 300  # characters shown of a text that comes from the recording


@dataclass(frozen=True)
class Difference:
    """A token whose computed logprob differs from the recorded one."""

    line: int
    request_id: str
    index: int  # of the sample
    position: int  # of the token in the completion
    token: int
    recorded: str  # the bits as 8 hex digits
    computed: str


@dataclass
class Report:
    """The findings so far. Saved after every call, for --resume. Samples are identified by the sum of their
    line."""

    file: str = ""
    lines: int = 0  # that hold samples
    sealed: bool = False  # the recording ends with its seal
    is_open: bool = False  # a recorder has the file open
    equal: dict[str, int] = field(default_factory=dict)  # tokens of each equal sample
    unequal: dict[str, int] = field(default_factory=dict)  # tokens that differ
    undrawable: dict[str, str] = field(default_factory=dict)  # why a sample cannot have been drawn
    dictated: dict[str, dict[str, Any]] = field(default_factory=dict)  # see note_dictated
    tokens: int = 0  # compared
    differences: list[dict] = field(default_factory=list)  # the first SHOWN
    faults: list[str] = field(default_factory=list)  # lines that cannot be read or were changed
    missing: dict[str, int] = field(default_factory=dict)  # numbers of samples not computed, by reason

    @property
    def verdict(self) -> str:
        """PASSED means: every sample was computed again, is equal in every bit and can have been drawn, and
        the recording is complete."""
        if self.unequal or self.undrawable or self.faults or self.missing:
            return "FAILED"
        if not self.sealed:
            return "INCOMPLETE"
        return "PASSED" if self.equal else "FAILED"

    @property
    def passed(self) -> bool:
        return self.verdict == "PASSED"

    def is_done(self, line_sum: str) -> bool:
        return line_sum in self.equal or line_sum in self.unequal

    def belongs_to(self, sums: set[str]) -> bool:
        """Whether a recording with these lines has every sample that the report mentions."""
        return all(
            sums.issuperset(part) for part in (self.equal, self.unequal, self.undrawable, self.dictated)
        )

    def note_dictated(self, line_sum: str, certain: int, parameters: list[str]) -> None:
        """Notes that `certain` tokens of a sample had probability 1, and under which parameters."""
        self.dictated[line_sum] = {"certain": certain, "parameters": parameters}


def printable(value: Any) -> str:
    """Returns a text from a recording as one line without control characters, which could forge a report."""
    text = str(value)
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _dictated(report: Report) -> tuple[str, list[str]]:
    """Describes which sampling parameters chose tokens in place of the model. The first text is for the
    verdict, and is empty unless there is a logit_bias or half of the tokens were certain; the second has the
    details."""
    certain = sum(entry["certain"] for entry in report.dictated.values())
    samples = Counter(name for entry in report.dictated.values() for name in entry["parameters"])
    if not samples:
        return "", []
    names = ", ".join(f"{name} in {count} samples" for name, count in samples.items())
    told = (
        f"{certain} of {report.tokens} tokens were certain (probability 1) under sampling parameters: {names}"
    )
    if 2 * certain >= report.tokens:
        return f", but parameters dictated {certain} of {report.tokens} tokens", [told]
    return (", with a logit_bias" if "logit_bias" in samples else ""), [told]


def _seal_lines(report: Report) -> list[str]:
    if report.sealed:
        return []
    if report.is_open:
        return ["no seal at its end: a recorder has it open, and may add samples"]
    return ["no seal at its end: samples may be missing. It was cut off, or its writer did not close it"]


def text_of(report: Report) -> str:
    """The report as text for a terminal."""
    unequal = sum(report.unequal.values())
    restriction, dictated = _dictated(report)
    lines = [
        f"{printable(report.file)}: {report.verdict}{restriction}",
        f"  {unequal} of {report.tokens} tokens unequal, in {len(report.equal) + len(report.unequal)} of"
        f" {report.lines} samples",
    ]
    lines += [f"  {line}" for line in (*_seal_lines(report), *dictated)]
    lines += [
        f"  line {d['line']}, request {printable(d['request_id'])}, sample {d['index']}, token"
        f" {d['position']} (id {d['token']}): recorded {d['recorded']}, computed {d['computed']}"
        for d in report.differences
    ]
    for kind, texts in (("impossible samples", [*report.undrawable.values()]), ("faults", report.faults)):
        lines += [f"  {text}" for text in texts[:SHOWN]]
        if len(texts) > SHOWN:
            lines.append(f"  and {len(texts) - SHOWN} more {kind}")
    lines += [
        f"  {count} samples not computed: {printable(reason)}" for reason, count in report.missing.items()
    ]
    return "\n".join(lines)


def html_of(report: Report) -> str:
    """The report as one self-contained HTML page."""
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(printable(value))}</td>" for value in d.values()) + "</tr>"
        for d in report.differences
    )
    heads = "".join(f"<th>{name}</th>" for name in Difference.__dataclass_fields__)
    summary, *rest = (html.escape(line.strip()) for line in text_of(report).split("\n"))
    items = "".join(f"<li>{line}</li>" for line in rest)
    table = f"<table><tr>{heads}</tr>{rows}</table>" if rows else ""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>isobit audit</title><style>'
        "body{font:16px system-ui;margin:2em;max-width:70em}td,th{padding:.2em .8em;text-align:left;"
        "font-family:monospace}</style>"
        f"<h1>{summary}</h1><ul>{items}</ul>{table}</html>\n"
    )
