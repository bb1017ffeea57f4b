"""A round's capabilities from selection to gate, from the store alone and without the libraries that made them:
`trace-agent status` and the page of a round that is not done tell of them, too."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from db import (
    AdapterRow,
    CapabilityRow,
    EnvironmentRow,
    EnvironmentState,
    SelectionRow,
    Store,
    TrainingStepRow,
    VerdictRow,
)
from tasks.reporting.before_after import last_verdict
from tasks.reporting.figures import (
    Calibration,
    CapabilityFigures,
    Ending,
    SynthesisVersion,
    TrainingStep,
    Transfer,
)
from tasks.reporting.history import WHOLE
from tasks.round.adapters import adapter_id
from tasks.round.results import (
    CalibrateResult,
    GateResult,
    RegisterResult,
    SelectResult,
    SynthesizeResult,
    TrainResult,
    starts_text,
)
from tasks.round.stored import StoredRound
from tasks.synthesis.bank import BANK

# What a generalist learns from, where its counts are not stored.
SOURCES = "successes and reference solutions"


def capabilities_of(stored: StoredRound, before: Collection[str]) -> list[CapabilityFigures]:
    """What the round has stored of each capability that it looked at, as far as it has come, the selected ones first;
    `before` are those of which the live release had a version."""
    store, round_id = stored.store, stored.round.id
    rows = {r.id: r for r in store.rows(CapabilityRow, round_id=round_id)}
    verdicts = {r.subject: r for r in store.rows(VerdictRow, round_id=round_id)}
    adapters = {r.id: r for r in store.rows(AdapterRow, round_id=round_id)}
    figures = []
    for s in sorted(
        store.rows(SelectionRow, round_id=round_id), key=lambda r: (r.rank is None, r.rank, -(r.mean_delta or 0.0))
    ):
        name = rows[s.capability_id].name
        registered = stored.found(RegisterResult, name) if stored.goes_on(RegisterResult, name) else None
        gated = verdicts.get(name)
        verdict, reasons = last_verdict(gated, verdicts.get(WHOLE)) if gated else _last_word(stored, name, s)
        trained, synthesized = stored.found(TrainResult, name), stored.found(SynthesizeResult, name)
        # Of several versions of an environment each has an adapter of its own.
        version = synthesized.versions if synthesized else 1
        adapter = adapters.get(trained.adapter if trained else adapter_id(round_id, name, version))
        # A generalist of whose practice nothing is kept has no step but those that it learnt in.
        learnt = trained is not None and trained.learnt
        steps = store.rows(TrainingStepRow, adapter_id=adapter.id) if adapter and not learnt else []
        figures.append(
            CapabilityFigures(
                name=name,
                mean_cov=s.mean_cov,
                mean_delta=s.mean_delta,
                runs_passed=s.runs_passed,
                base_success=adapter.base_success if adapter else None,
                adapter_success=adapter.adapter_success if adapter else None,
                adapter=registered.served_name if registered else None,
                verdict=verdict,
                alone=gated.verdict if gated else "",
                renewed=name in before,
                ending=trained.ending if trained else "",
                chosen=trained.chosen if trained else None,
                selected=s.selected,
                definition=rows[s.capability_id].definition,
                reasons=reasons,
                steps=[_step(r) for r in sorted(steps, key=lambda r: r.step)],
                calibration=_calibration(stored, name),
                points=gated.points if gated else None,
                adjusted_p=gated.p_holm if gated else None,
                version=registered.version if registered else None,
                kappa=s.kappa,
                versions=versions_of(store, round_id, s.capability_id),
                transfer=_transfer(trained),
                begun=starts_text(trained.starts, trained.keeps) if trained and trained.starts else "",
                learnt=_learnt(trained, adapters),
                passed_over=synthesized.passed_over if synthesized else {},
            )
        )
    return figures


def _step(row: TrainingStepRow) -> TrainingStep:
    """A step's figures, on the capability's own scenarios where they were counted apart."""
    own = {name: row.metrics.get(f"own_{name}", getattr(row, name)) for name in ("reward", "success")}
    return TrainingStep(step=row.step, retention=row.metrics.get("retention_success"), **own)


def _last_word(stored: StoredRound, name: str, selection: SelectionRow) -> tuple[str, list[str]]:
    """What stands last on a capability that the gate did not judge, with its reasons."""
    if not selection.selected:
        return "not-selected", [selection.reason]
    selected = stored.found(SelectResult)
    if selected and name in selected.unfit:
        return "not-trainable", [selected.unfit[name]]
    made, measured = stored.found(SynthesizeResult, name), stored.found(CalibrateResult, name)
    if made is None and stored.found(GateResult) is not None:
        return "postponed", [
            "Selected, but the round trains fewer capabilities (selection.most); another round may take it."
        ]
    if made and not made.accepted:
        return "postponed" if made.same_as else "unsynthesizable", made.reasons
    if measured and not measured.accepted:
        return "mastered" if measured.mastered else "unsynthesizable", [measured.reason]
    trained = stored.found(TrainResult, name)
    if trained and trained.verdict:
        return trained.verdict.partition(":")[0], [trained.verdict]
    if trained and trained.unused:
        return "mastered" if trained.ending == Ending.MASTERED else "no-gain", [trained.unused]
    measuring = stored.found(RegisterResult, name)
    if measuring and measuring.skipped:
        return measuring.skipped.partition(":")[0], [measuring.skipped]
    return "unfinished", ["The round has not come to its gate."]


def _learnt(trained: TrainResult | None, adapters: Mapping[str, AdapterRow]) -> str:
    """What an adapter, or what it practised from, learnt from without GRPO, with how many of each there were, and that
    nothing of its practice is kept, where it is so; "" for one that GRPO trained alone. `adapters` are the round's, by
    id."""
    if trained is None or not (trained.learnt or trained.before):
        return ""
    adapter = adapters.get(trained.before or trained.adapter)
    config = adapter.config if adapter else {}
    counts = {"successes": config.get("successes"), "reference solutions": config.get("demonstrations")}
    sources = " and ".join(f"{count} {what}" for what, count in counts.items() if count) or SOURCES
    unkept = f" (it practised then, and nothing of that is kept: {trained.unkept})" if trained.unkept else ""
    return sources + unkept


def _transfer(trained: TrainResult | None) -> Transfer | None:
    if trained is None or trained.transfer is None:
        return None
    return Transfer(**trained.transfer.model_dump(include=set(Transfer.model_fields)))


def _calibration(stored: StoredRound, name: str) -> Calibration | None:
    measured, made = stored.found(CalibrateResult, name), stored.found(SynthesizeResult, name)
    if measured is None:
        return None
    return Calibration(
        accepted=measured.accepted,
        verdict=measured.reason,
        mean_reward=measured.mean_reward if measured.played else None,
        success=measured.success_rate if measured.played else None,
        informative=measured.informative if measured.played else None,
        version=made.versions if made else 1,  # the accepted one is the last that a model wrote
    )


def versions_of(store: Store, round_id: str, capability_id: str) -> list[SynthesisVersion]:
    """The versions of a capability's environment that a model wrote, in order."""
    rows = store.rows(EnvironmentRow, round_id=round_id, capability_id=capability_id, kind="llm")
    return [
        SynthesisVersion(
            number=r.version,
            accepted=r.state in (EnvironmentState.ACCEPTED, EnvironmentState.WITHDRAWN),
            code_hash=r.code_hash[:12],
            sandbox=r.sandbox_level,
            reasons=list(r.spec.get("reasons", ())),
            banked=banked(r),
        )
        for r in sorted(rows, key=lambda r: r.version)
    ]


def banked(row: EnvironmentRow) -> bool:
    """Whether an environment that a model wrote is of an earlier round."""
    return str(row.spec.get("request_hash", "")).startswith(BANK)
