"""From failure to release: for each capability that a round tried, the way failure -> label -> environment -> adapter
-> verdict -> release, as cards with the figures that each step rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from db import AdapterRow, CapabilityRow, EnvironmentRow, SelectionRow
from tasks.measuring.gate_plan import p_phrase
from tasks.reporting.figures import CapabilityFigures, RoundFigures, percent, two
from tasks.round.results import SynthesizeResult, TrainResult
from tasks.round.stored import StoredRound


@dataclass(frozen=True)
class Card:
    """One step of the way: what it is (`failure`, ...), what stands there, and its figures; `reached` is False for a
    step that was not come to. `link` is an address relative to the page ("" for none)."""

    step: str
    title: str
    lines: tuple[str, ...] = ()
    link: str = ""
    reached: bool = True


@dataclass(frozen=True)
class Lineage:
    """The way of one capability, with what became of it in the end."""

    capability: str
    verdict: str
    cards: tuple[Card, ...]


def lineages_of(stored: StoredRound, figures: RoundFigures, links: Mapping[str, str]) -> list[Lineage]:
    """The ways of all selected capabilities, in order of selection. `links` are addresses of pages: `diagnosis`, and a
    capability's own by its name."""
    store, round_id = stored.store, stored.round.id
    ids = {r.name: r.id for r in store.rows(CapabilityRow, round_id=round_id)}
    chosen = {r.capability_id: r for r in store.rows(SelectionRow, round_id=round_id, selected=True)}
    return [
        Lineage(
            c.name,
            c.verdict,
            (
                _failure(c, chosen[ids[c.name]], figures, links.get("diagnosis", "")),
                _label(c, figures),
                _environment(stored, c, ids[c.name]),
                _adapter(stored, c, links.get(c.name, "")),
                _verdict(c),
                _release(c, figures),
            ),
        )
        for c in figures.capabilities
        if c.selected and ids.get(c.name) in chosen
    ]


def as_table(found: Sequence[Lineage]) -> str:
    """The ways as a table in Markdown, for Prefect's page; "" without any."""
    if not found:
        return ""
    steps = [card.step for card in found[0].cards]
    lines = [f"| capability | {' | '.join(steps)} |", "|---" * (len(steps) + 1) + "|"]
    lines += [
        f"| {way.capability} | {' | '.join(c.title.replace('|', '/') if c.reached else '–' for c in way.cards)} |"
        for way in found
    ]
    return "\n".join(lines)


def _failure(c: CapabilityFigures, selection: SelectionRow, figures: RoundFigures, link: str) -> Card:
    if c.mean_cov is None:
        return Card("failure", "what all its capabilities are for", (selection.reason,), link)
    count = len(selection.evidence)
    shown = f"{count} failed episode{'s' if count != 1 else ''} as evidence"
    return Card("failure", shown, (f"{percent(c.mean_cov)} of the failures lack it",), link)


def _label(c: CapabilityFigures, figures: RoundFigures) -> Card:
    if c.mean_cov is None:
        return Card("label", "that of its capabilities", reached=False)
    rule = figures.selection
    lines = [f"contrast {two(c.mean_delta)} (from {rule.delta:g})", f"{c.runs_passed} of {rule.n} runs (from {rule.k})"]
    if c.kappa is not None:
        lines.append(f"kappa {two(c.kappa)}")
    return Card("label", f"lacking, by {rule.analyst}", tuple(lines))


def _environment(stored: StoredRound, c: CapabilityFigures, capability_id: str) -> Card:
    made = stored.found(SynthesizeResult, c.name)
    rows = stored.store.rows(EnvironmentRow, round_id=stored.round.id, capability_id=capability_id)
    if not rows:
        return Card("environment", "none was made", reached=False)
    last = max(rows, key=lambda r: r.version)
    lines = [f"version {last.version}, {'written' if last.kind == 'llm' else 'composed'}", str(last.state)]
    if c.calibration and c.calibration.success is not None:
        lines.append(f"what training goes on from, there: success {percent(c.calibration.success)}")
    return Card("environment", last.id, tuple(lines), reached=bool(made and made.accepted))


def _adapter(stored: StoredRound, c: CapabilityFigures, link: str) -> Card:
    trained = stored.found(TrainResult, c.name)
    if trained is None:
        return Card("adapter", "none was trained", reached=False)
    lines = [f"{trained.in_words(c.learnt)}, weights of step {trained.chosen}" if trained.chosen else trained.unused]
    if trained.before and not trained.learnt:
        lines.append(f"begun from {trained.began_from(c.name)} from {c.learnt}")
    if trained.starts:
        lines.append(f"begun from {trained.began_from(c.name)}, of {len(trained.starts)} that were compared")
    if c.adapter_success is not None:
        lines.append(f"fresh seeds: {percent(c.base_success)} to {percent(c.adapter_success)}")
    row = stored.store.row(AdapterRow, id=trained.adapter)
    title = c.adapter or (f"adapter {row.id}" if row else trained.adapter)
    return Card("adapter", title, tuple(lines), link, reached=trained.goes_on)


def _verdict(c: CapabilityFigures) -> Card:
    if not c.alone:
        return Card("verdict", "not judged", tuple(c.reasons[:1]), reached=False)
    lines = [f"{c.points:+.1f} points on its own families"] if c.points is not None else []
    lines += [f"{p_phrase(c.adjusted_p)} after Holm"] if c.adjusted_p is not None else []
    return Card("verdict", f"alone: {c.alone}", tuple(lines), "../report.html#selection")


def _release(c: CapabilityFigures, figures: RoundFigures) -> Card:
    made = figures.release
    if made is None or c.name not in {*made.new, *made.renewed}:
        return Card("release", "in none", reached=False)
    lines = [made.verdict or "not judged"]
    if made.points is not None:
        lines.append(f"{made.points:+.1f} points as a whole" + (f", {p_phrase(made.p)}" if made.p is not None else ""))
    return Card("release", f"release {made.number}", tuple(lines), "../report.html#release", made.verdict == "promoted")
