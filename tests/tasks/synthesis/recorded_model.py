"""A recorded model: the replies that a round's analyst and author would give, written by hand, behind real HTTP; every
request that reaches it is kept, so that a test reads what was really sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.models.providers.scripted_analyst import good

# How a request's first message begins, by what it is for.
KINDS = {
    "This is a test": "probe",
    "Name at most": "discovery",
    "Label every pair": "labelling",
    "These failed trajectories": "judging",
    "You write training environments": "authoring",
}


def kind_of(request: dict[str, Any]) -> str:
    """What a request is for."""
    begins = request["messages"][0]["content"]
    return next(kind for start, kind in KINDS.items() if begins.startswith(start))


def text_of(request: dict[str, Any]) -> str:
    """All that a request says, schema included."""
    return "\n\n".join([*(m["content"] for m in request["messages"]), str(request.get("response_format", ""))])


def render(requests: list[dict[str, Any]], folder: Path) -> list[tuple[str, str]]:
    """(kind, text) of every request in order, each read back from a file of its own in `folder`."""
    kinds = [kind_of(request) for request in requests]
    for number, (kind, request) in enumerate(zip(kinds, requests, strict=True)):
        (folder / f"{number:03}-{kind}.txt").write_text(text_of(request), encoding="utf-8")
    files = sorted(folder.glob("*.txt"))
    return [(path.stem.partition("-")[2], path.read_text(encoding="utf-8")) for path in files]


class RecordedModel:
    """Names one `capability`, calls it lacking where an agent said `marker`, and writes the `modules` in turn.
    `asked(n)` is called when the n-th module is asked for. The first answer to a labelling request is no JSON."""

    def __init__(self, capability: str, marker: str, modules: list[str], asked: Callable[[int], object]) -> None:
        self.capability, self.marker, self.modules, self.asked = capability, marker, modules, asked
        self.written = 0
        self.spoiled = False

    def __call__(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        content = request["messages"][1]["content"] if len(request["messages"]) > 1 else ""
        match kind_of(request):
            case "probe":
                return good({"ready": True})
            case "discovery":
                return good({"capabilities": [self._found(content)]})
            case "labelling" if not self.spoiled:
                self.spoiled = True
                return good("not json")
            case "labelling":
                return good({"labels": [self._label(*block) for block in blocks(content)]})
            case "judging":
                return good({"reason": "It can be practised.", "cause": "agent"})
            case _:
                self.written += 1
                self.asked(self.written)
                return good({"module": self.modules[self.written - 1]})

    def _found(self, content: str) -> dict[str, Any]:
        shown = {outcome: re.findall(rf"### (T\d+) \({outcome}\)", content) for outcome in ("FAILED", "PASSED")}
        return {
            "name": self.capability,
            "definition": "The agent does exactly what was asked for. It gives every value as it was said.",
            "failed_examples": shown["FAILED"][:2],
            "passed_examples": shown["PASSED"][:2],
        }

    def _label(self, alias: str, text: str) -> dict[str, str]:
        label = "LACKING" if self.marker in text else "PRESENT"
        return {"trajectory": alias, "capability": self.capability, "label": label}


def blocks(content: str) -> list[tuple[str, str]]:
    """(alias, text) of the trajectories in a labelling request."""
    return re.findall(r"### (T\d+)\n(.*?)(?=\n\n### T\d|\Z)", content, re.S)
