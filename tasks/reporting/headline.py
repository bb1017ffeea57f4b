"""The verdict on a round in two or three sentences, from its figures alone: what improved, by how much and how surely,
or that nothing did and why."""

from __future__ import annotations

from tasks.measuring.gate_plan import LEFT, p_phrase
from tasks.reporting.figures import AT_WORK, GONE, Difference, Ending, Rate, RoundFigures, percent, release_name

SIGNIFICANT = 0.05
# Endings without an adapter that are no failure.
GOOD_ENDINGS = (Ending.NOTHING_LACKING, Ending.MASTERED)
# What became of a release that the gate made live, by its state: the test split is played after that, for hours maybe.
SINCE = {"rolled-back": "has been rolled back since", "retired": "has been replaced since"}


def headline(figures: RoundFigures) -> str:
    """What a person reads first: of the release that was live before the round and the one that is live after it; of
    base and routed in figures from before there were releases."""
    if figures.stopped == GONE:  # what is not known must not be told as not having been
        return why_nothing(figures)
    said = [_of_releases(figures) if figures.before is not None else _of_base_and_routed(figures)]
    if figures.data_before:
        said.insert(
            0,
            f"The data of {figures.target} changed ({figures.data_before[:12]} to {figures.data_hash[:12]}): a new "
            "lineage begins, and figures of earlier rounds do not compare.",
        )
    return " ".join(said)


def tone(figures: RoundFigures) -> str:
    """How the headline is meant: `good`, `bad`, or `flat`."""
    if not figures.promoted and figures.ending in GOOD_ENDINGS:
        return "good"
    difference = figures.gain if figures.before else figures.difference
    if difference is None or difference.p > SIGNIFICANT or difference.points == 0:
        return "flat"
    return "good" if difference.points > 0 else "bad"


def why_nothing(figures: RoundFigures) -> str:
    """One sentence on why the round made no adapter live."""
    if figures.stopped:
        if figures.ending:
            return figures.stopped
        if figures.stopped in (AT_WORK, GONE):
            return f"{figures.stopped[0].upper()}{figures.stopped[1:]}."
        return f"The round stopped early: {figures.stopped}"
    if figures.promoted:
        return "Adapters were promoted on validation; see the capabilities below."
    chosen = [c for c in figures.capabilities if c.selected]
    if not figures.capabilities:
        return "No candidate capability was found."
    if not chosen:
        return f"None of {len(figures.capabilities)} candidates reached the selection thresholds."
    reasons = ", ".join(f"{c.name} ({c.verdict})" for c in chosen)
    return f"No adapter was promoted: {reasons}."


def unsaid(figures: RoundFigures) -> str:
    """That the round is not over, or why it stopped, where the headline does not say so; else ""."""
    if not figures.stopped or figures.stopped.lower() in headline(figures).lower():
        return ""
    return f"The round stopped early: {figures.stopped}" if figures.collected else why_nothing(figures)


def deciding_reason(verdict: str, reasons: list[str]) -> str:
    """The one of the gate's reasons that its verdict rests on: the fall that blocks, of a regression one that is
    certain, else what the gate said last."""
    falls = [r for r in reasons if " fell by " in r.lower() and "within its resolution" not in r and LEFT not in r]
    if falls and verdict == "rejected-regression":
        return next((r for r in falls if "below zero" in r), falls[0])
    if falls and falls[-1] == reasons[-1]:
        return falls[0]
    return reasons[-1] if reasons else ""


def _of_releases(figures: RoundFigures) -> str:
    made = figures.release
    if made is not None and made.verdict == "promoted":
        return _promoted(figures)
    if made is not None and made.verdict:
        why = deciding_reason(made.verdict, made.reasons)
        return f"Release {made.number} was refused ({made.verdict}): {why} {_goes_on(figures)}".replace("  ", " ")
    tried = [c for c in figures.capabilities if c.alone]
    if tried and not figures.stopped:
        verdicts = ", ".join(f"{c.name} ({c.alone})" for c in tried)
        return f"No adapter was better than what answers today: {verdicts}. {_goes_on(figures)}"
    why = why_nothing(figures)
    return f"{why}{'' if why.endswith(('.', '…')) else '.'} {_goes_on(figures)}"


def _promoted(figures: RoundFigures) -> str:
    """Of a round whose candidate became live."""
    made = figures.release
    assert made is not None
    brought = "; ".join(
        f"{what}: {', '.join(names)}"
        for what, names in (("new", made.new), ("renewed", made.renewed), ("answered as before", made.left))
        if names
    )
    brought = f" {brought[:1].upper()}{brought[1:]}." if brought else ""
    before, after, base = figures.live, figures.routed, figures.base
    lives = f"became live and {SINCE[made.state]}" if made.state in SINCE else "is live"
    if not figures.collected:  # it may be being played
        return f"Release {made.number} {lives}; what it comes to on the test split is not collected.{brought}"
    if before is None or after is None:
        return f"Release {made.number} {lives}, and was not played on the test split.{brought}"
    if figures.gain is None:
        return (
            f"Release {made.number} {lives}. On the test split nothing was compared: it and "
            f"{release_name(figures.before)} finished no task of it in common, because of errors.{brought}"
        )
    moved = _moved(f"success on {figures.target}", (before, release_name(figures.before)), after, figures.gain)
    said = f"Release {made.number} {lives}: {moved}"
    if figures.gain.p > SIGNIFICANT and made.points is not None and made.p is not None:
        said += f" On validation, where the gate looked, it was {made.points:+.1f} points ({p_phrase(made.p)})."
    said += brought
    if figures.before and base is not None:
        said += f" The bare base stands at {percent(base.success)}."
    return said


def _goes_on(figures: RoundFigures) -> str:
    """What answers users after a round that changed nothing, and where it stands."""
    name = release_name(figures.before)
    said = f"{name[:1].upper()}{name[1:]} goes on"
    if figures.routed is None:
        return f"{said}."
    said += f" at {percent(figures.routed.success)} on the test split ({_interval(figures.routed)})"
    if figures.before and figures.base is not None:
        said += f"; the bare base stands at {percent(figures.base.success)}"
    return f"{said}."


def _of_base_and_routed(figures: RoundFigures) -> str:
    promoted = figures.promoted
    adapters = f" Promoted: {', '.join(promoted)}." if promoted else " No adapter was promoted: the base model goes on."
    difference, base, routed = figures.difference, figures.base, figures.routed
    if difference is None or base is None or routed is None:
        return f"No before-and-after comparison was made. {why_nothing(figures)}"
    moved = _moved(f"Success on {figures.target}", (base, ""), routed, difference)
    if difference.p <= SIGNIFICANT and difference.points != 0:
        return f"{moved}{adapters}"
    return moved + (adapters if promoted else f" {why_nothing(figures)}")


def _moved(what: str, before: tuple[Rate, str], after: Rate, difference: Difference) -> str:
    """How far a rate went from `before` (with what it is called), and how surely."""
    rate, name = before
    called = f" ({name})" if name else ""
    span = f" (95 % interval {difference.low:+.1f} to {difference.high:+.1f}" if difference.low is not None else " ("
    span += f"{', ' if difference.low is not None else ''}{p_phrase(difference.p)}, {difference.tasks or 'all'} tasks"
    # A rate is over all tasks that its side finished: where one lost some, theirs is not the paired difference.
    apart = 100 * (after.success - rate.success)
    span += ")" if abs(apart - difference.points) < 0.05 else " that both finished)"
    rates = f"from {percent(rate.success)}{called} to {percent(after.success)}: {difference.points:+.1f} points{span}."
    if difference.p <= SIGNIFICANT and difference.points != 0:
        return f"{what} {'rose' if difference.points > 0 else 'fell'} {rates}"
    power = f" A change below {difference.mde:.1f} points could not have been seen reliably."
    if difference.mde >= 100:
        power = " With so few tasks no change could have been seen reliably."
    if difference.points == 0 and after.success == rate.success:
        return f"{what} stayed at {percent(rate.success)}{called}{span}.{power}"
    return f"{what} went {rates} That is within noise.{power}"


def _interval(rate: Rate) -> str:
    return f"95 % interval {100 * rate.low:.1f} to {percent(rate.high)}"
