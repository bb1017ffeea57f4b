"""Everything around a home looked at once: what is wrong, how bad it is, and what to do. Nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator

from errors import TraceError
from settings import Settings
from tasks.housekeeping.findings import Finding, Level, fault, of_error
from tasks.housekeeping.machine_checks import machine_findings
from tasks.housekeeping.round_checks import round_findings
from tasks.housekeeping.service_checks import service_findings
from tasks.housekeeping.stored_checks import stored_findings
from tasks.unattended.stalls import pulse


def examine(settings: Settings) -> list[Finding]:
    """All findings, those that are well among them, in the order in which they are best mended."""
    found = [*_careful("machine", machine_findings(settings)), *_careful("round", round_findings(settings))]
    services = list(_careful("servers", service_findings(settings)))
    answers = all(f.level == Level.OK for f in services if f.check == "mlflow")
    return [*found, *services, *_careful("store", stored_findings(settings, answers))]


def lines(findings: list[Finding]) -> list[str]:
    """As people read them: one line each, and what to do below."""
    width = max((len(f.check) for f in findings), default=0)
    told = []
    for f in findings:
        told.append(f"{f.level:<8} {f.check:<{width}} {f.said}")
        if f.do:
            told.append(f"{'':<8} {'':<{width}} -> {f.do}")
    return told


def _careful(check: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """An error of ours that ends a group of checks is a finding as well, and so is a file that nobody here may look at;
    the other groups are still looked at."""
    try:
        for found in findings:
            pulse()
            yield found
    except TraceError as problem:
        yield of_error(check, problem)
    except OSError as problem:
        said = f"{problem.filename or 'a file'} cannot be looked at ({problem.strerror or problem})"
        yield fault(check, said, "let this user read and write it, or give another path")
