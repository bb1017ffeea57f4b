"""Stage 4 with the `llm` synthesizer on a round: the analyst's model writes the environment of a capability.

What the model is told and how a version is judged stands in `tasks.synthesis.module_writer`; here it is read from and
written to the store. Every version is kept as soon as it is judged, the refused ones too; the accepted one is also a
file in the round's folder `environments/`, for `trace-agent play` and `trace-agent validate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prefect.artifacts import create_markdown_artifact

from db import (
    CalibrationRow,
    CapabilityRow,
    EnvironmentRow,
    EnvironmentState,
    LabelRow,
    Round,
    SelectionRow,
    Store,
    row_id,
)
from environments.contract import Generators, Target, TargetTask
from environments.sandbox.workers import SandboxLevel
from environments.synthesized.module_contract import VERSION
from environments.synthesized.module_files import save_module
from environments.synthesized.modules import SandboxedModule
from environments.synthesized.written import WrittenEnvironment, WrittenSpec
from environments.validation.checks import Limits, ValidationVerdict
from errors import StoreError
from models.episodes import Guarded
from models.objects import files_of
from settings import Settings
from tasks.mining.llm_analyst import transcripts_of
from tasks.mining.transcripts import compact
from tasks.round.results import SynthesizeResult
from tasks.round.rollouts import outcomes
from tasks.round.stored import StoredRound
from tasks.round.target_prompt import target_prompt
from tasks.synthesis.author_feedback import band_text
from tasks.synthesis.author_request import Brief, Synthesis, Version
from tasks.synthesis.bank import BANK, bank_of, nearest
from tasks.synthesis.calibration import FIGURES, Calibration, limits_of
from tasks.synthesis.module_writer import Calibrate, SynthesisRules, Writer, judge_module, synthesize
from tasks.synthesis.target_material import held_out_sources, judged_answers, tool_answers
from tasks.unattended.prefect_pages import show

EVIDENCE = 5
# Share of a family's labels that call the capability required, from which the family counts as needing it.
NEEDED = 0.5
UNCONFINED = (
    "Generated code ran without namespaces, as the user of this process (TRACE_SANDBOX=process): a system-call filter "
    "was all that confined it. Install bubblewrap and unset TRACE_SANDBOX."
)


@dataclass(frozen=True)
class EnvironmentWriter:
    """Has a language model write the environments of a round's capabilities. `measure` plays the base in one;
    `held_out` gives the tasks that its scenarios must not repeat."""

    client: Writer
    stored: StoredRound
    target: Target
    settings: Settings
    measure: Callable[[WrittenEnvironment], Calibration]
    held_out: Callable[[], Sequence[TargetTask]]

    def write(self, capability: str) -> SynthesizeResult:
        """Have an environment written, judged and calibrated; the result of the stage.

        Versions that a stopped attempt has judged are not judged again, and replies that it was given are not paid
        again.
        """
        calibrations: dict[str, Calibration] = {}

        def calibrate(module: SandboxedModule) -> ValidationVerdict:
            spec = self._spec(capability, module.code_hash, module.capability)
            measured = self.measure(WrittenEnvironment(self.target, spec, module, guard=Guarded.made))
            calibrations[module.code_hash] = measured
            reasons = () if measured.accepted else (measured.reason,)
            numbers = {name: measured.figures[name] for name in FIGURES}
            figures = {**numbers, "reason": measured.reason, "exhibits": list(measured.exhibits)}
            if measured.level is not None:
                figures |= {"level": measured.level, "levels": dict(measured.by_level)}
            return ValidationVerdict(measured.accepted, reasons, figures)

        def keep(version: Version) -> None:
            self._store(capability, version, calibrations.get(version.code_hash), passed_over)

        s = self.settings
        rules = SynthesisRules(limits_of(s.calibration), s.synthesizer.versions, s.analyst.temperature)
        brief, known = self._brief(capability), self._judged(capability)
        passed_over = self._passed_over(capability)
        if not known:
            known = self._from_bank(brief, calibrate, rules.limits, keep, passed_over)
        synthesis = synthesize(self.client, brief, calibrate, rules, known, keep)
        show_versions(synthesis, passed_over)
        best = synthesis.accepted
        if best is None:
            reasons = [f"version {v.number}: {'; '.join(v.reasons)}"[:1000] for v in synthesis.versions]
            return SynthesizeResult(
                accepted=False, reasons=reasons, versions=len(synthesis.versions), passed_over=passed_over
            )
        validation = best.verdicts["validation"]
        figures = dict(validation["figures"]) | {
            "calibration": best.verdicts["calibration"]["figures"],
            "target": self.stored.round.target,
            "version": best.number,
        }
        path = save_module(
            s.folder / self.stored.round.id / "environments", best.source, ValidationVerdict(True, (), figures)
        )
        for file in (path, path.with_suffix(".json")):
            files_of(s).put(str(file.relative_to(s.folder)))
        return SynthesizeResult(
            accepted=True,
            environment=self._version_id(capability, best.number),
            versions=len(synthesis.versions),
            file=str(path.relative_to(s.folder)),
            sandbox=best.sandbox_level,
            spend=self.stored.spent(),
            bank=best.request_hash.partition(BANK)[2],
            passed_over=passed_over,
        )

    def _from_bank(
        self,
        brief: Brief,
        calibrate: Calibrate,
        limits: Limits,
        keep: Callable[[Version], None],
        passed_over: dict[str, str],
    ) -> list[Version]:
        """The first of the nearest modules of the bank that passes every check of today and calibration on this round's
        policy, as the first version, so that nothing is asked; `passed_over` gets why the others do not (by hash)."""
        at, store = self.stored.round, self.stored.store
        bank = [entry for entry in bank_of(store, at.target) if entry.round < at.number]
        for entry in nearest(bank, brief.capability, brief.definition):
            why = entry.unusable
            if not why:
                version = judge_module(entry.code, f"{BANK}{entry.id}", brief, calibrate, limits)
                if version.accepted:
                    keep(version)
                    return [version]
                why = "; ".join(version.reasons)
            passed_over[entry.code_hash[:12]] = why[:1000]
        return []

    def _brief(self, capability: str) -> Brief:
        """What the model is told: the capability, evidence of it, the target's policy, tools and their answers."""
        store, round_id = self.stored.store, self.stored.round.id
        row = store.row(CapabilityRow, id=row_id(round_id, capability))
        if row is None:
            raise StoreError(f"round {round_id!r} has no capability {capability!r}; run the stage select first")
        chosen = store.row(SelectionRow, round_id=round_id, capability_id=row.id)
        frame = outcomes(store, self.stored.diagnosis().trajectories).set_index("id")["success"]
        evidence = [e["id"] for e in (chosen.evidence if chosen else ())][:EVIDENCE]
        budget = self.settings.analyst.trajectory_tokens
        shown, _ = transcripts_of(store, {i: bool(frame[i]) for i in evidence}, budget)
        prompt = target_prompt(self.target)
        rows = list(store.trajectories(None, id=list(frame.index)))
        return Brief(
            capability,
            row.definition,
            [compact(t.messages, budget, t.id) for t in shown],
            prompt.tools,
            prompt.instructions,
            tool_answers(self.target, [t.messages for t in rows], prompt.tools)
            if prompt.tools
            else judged_answers(self.target, rows),
            band_text(self.settings.calibration),
            held_out_sources(self.target, self.held_out()),
            prompt.examples,
        )

    def _spec(self, capability: str, code_hash: str, named: str) -> WrittenSpec:
        """The environment of a module: which families it is about, and its retention scenarios. `named` is the
        capability that the module itself names.

        A family needs the capability when most labels of its trajectories do (at least the one with the most);
        retention comes from all other families that the base has any success in, or, on a target without generators,
        from the solved diagnosis tasks whose labels do not call the capability lacking.
        """
        store, at_round = self.stored.store, self.stored.round
        frame = outcomes(store, self.stored.diagnosis().trajectories)
        given = store.rows(LabelRow, round_id=at_round.id, capability_id=row_id(at_round.id, capability))
        family, task = (dict(zip(frame["id"], frame[name], strict=True)) for name in ("family", "task"))
        weight: dict[str, float] = {}
        needed: dict[str, float] = {}
        lacking: dict[str, float] = {}
        for label in given:
            if label.trajectory_id not in family:
                continue
            name, at, n = family[label.trajectory_id], task[label.trajectory_id], float(label.weight)
            weight[name] = weight.get(name, 0.0) + n
            needed[name] = needed.get(name, 0.0) + n * (label.label != "NA")
            lacking[at] = lacking.get(at, 0.0) + n * (1.0 if label.label == "LACKING" else -1.0)
        shares = {name: needed[name] / weight[name] for name in sorted(weight) if weight[name]}
        own = {n for n, share in shares.items() if share >= NEEDED} or {max(shares, key=lambda n: shares[n])}
        success = frame.groupby("family")["success"].mean().to_dict()
        fresh = isinstance(self.target, Generators)
        solved = sorted(set(frame[frame["success"]]["task"]))
        families = tuple(sorted(n for n, rate in success.items() if rate > 0 and n not in own)) if fresh else ()
        tasks = () if fresh else tuple(t for t in solved if lacking.get(t, 0.0) <= 0)
        share = self.settings.calibration.retention_share if families or tasks else 0.0
        return WrittenSpec(
            at_round.target,
            at_round.data_hash,
            capability,
            code_hash,
            tuple(sorted({*own, capability, named})),
            families,
            tasks,
            share,
        )

    def _version_id(self, capability: str, number: int) -> str:
        """Id of a version's row."""
        return row_id(self.stored.round.id, capability, "llm", number)

    def _judged(self, capability: str) -> list[Version]:
        """The versions of a capability that were judged to the end, in order."""
        rows = _rows(self.stored.store, self.stored.round.id, capability)
        judged = [r for r in rows if r.state not in (EnvironmentState.DRAFT, EnvironmentState.CHECKED)]
        return [
            Version(
                r.version,
                r.code or "",
                r.code_hash,
                r.state == EnvironmentState.ACCEPTED,
                (*r.spec["reasons"], *([r.verdicts["withdrawn"]] if "withdrawn" in r.verdicts else [])),
                r.verdicts,
                r.sandbox_level,
                r.spec["request_hash"],
            )
            for r in judged
        ]

    def _passed_over(self, capability: str) -> dict[str, str]:
        """What was passed over in the bank before the first version, for an attempt that goes on behind it."""
        rows = _rows(self.stored.store, self.stored.round.id, capability)
        return dict(rows[0].spec.get("passed_over", {})) if rows else {}

    def _store(
        self, capability: str, version: Version, calibration: Calibration | None, passed_over: Mapping[str, str]
    ) -> None:
        """Keep a version. Its state is written last, so a version that is cut off here is judged again."""
        store, round_id = self.stored.store, self.stored.round.id
        identity = self._version_id(capability, version.number)
        named = version.verdicts.get("validation", {}).get("figures", {}).get("capability", capability)
        row = EnvironmentRow(
            id=identity,
            round_id=round_id,
            capability_id=row_id(round_id, capability),
            version=version.number,
            kind="llm",
            spec={
                "request_hash": version.request_hash,
                "reasons": list(version.reasons),
                "environment": asdict(self._spec(capability, version.code_hash, named)),
                "contract": VERSION,
                "passed_over": dict(passed_over),
            },
            code=version.source or None,
            code_hash=version.code_hash,
            state=EnvironmentState.DRAFT,
            sandbox_level=version.sandbox_level,
            verdicts=version.verdicts,
        )
        store.put([row])
        if calibration is not None:
            store.put([calibration.row(identity)])
            store.set_state(EnvironmentRow, identity, EnvironmentState.CHECKED)
        end = EnvironmentState.ACCEPTED if version.accepted else EnvironmentState.REJECTED
        store.set_state(EnvironmentRow, identity, end)


def accepted_environment(
    store: Store, at: Round, target: Target, capability: str, keep: Callable[..., WrittenEnvironment]
) -> WrittenEnvironment:
    """The accepted version at the level that calibration found, its module open until the round is closed (`keep` is
    `Context.keep`)."""
    accepted = [r for r in _rows(store, at.id, capability) if r.state == EnvironmentState.ACCEPTED]
    if not accepted:
        raise StoreError(f"round {at.id!r} has no accepted environment for {capability!r}; synthesize first")
    row, code = accepted[-1], accepted[-1].code or ""
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.spec["environment"].items()}
    spec = WrittenSpec(**fields)
    calibrated = store.row(CalibrationRow, id=row_id(row.id, "calibration"))
    level = int(calibrated.detail.get("level", 0)) if calibrated else 0
    # In the level of sandbox that works and is allowed here and now, not in the one that it was judged in: a user who
    # allowed `process` once may have taken that back.
    return keep(
        f"environment {spec.id}",
        lambda: WrittenEnvironment(target, spec, SandboxedModule(code), level, guard=Guarded.made),
    )


def _rows(store: Store, round_id: str, capability: str) -> list[EnvironmentRow]:
    found = store.rows(EnvironmentRow, round_id=round_id, capability_id=row_id(round_id, capability), kind="llm")
    return sorted(found, key=lambda r: r.version)


def show_versions(synthesis: Synthesis, passed_over: Mapping[str, str]) -> None:
    """Artifacts of the stage: every version with its reasons, modules of the bank that were `passed_over`, and the
    warning about a missing sandbox."""
    lines = [f"**{synthesis.capability}**: {synthesis.state} after {len(synthesis.versions)} version(s)"]
    lines += [f"- `{code_hash}` of the bank was passed over: {why}" for code_hash, why in passed_over.items()]
    for v in synthesis.versions:
        verdict = "accepted" if v.accepted else "; ".join(v.reasons)[:1000]
        lines.append(
            f"- version {v.number} `{v.code_hash[:12] or 'no module'}` (sandbox: {v.sandbox_level}"
            f"{', from the bank' if v.request_hash.startswith(BANK) else ''}): {verdict}"
        )
    if any(v.sandbox_level == str(SandboxLevel.PROCESS) for v in synthesis.versions):
        lines.insert(0, f"**Warning.** {UNCONFINED}")
        show(create_markdown_artifact, key="sandbox-warning", markdown=UNCONFINED)
    key = f"environment-{synthesis.capability.replace('_', '-')}"
    show(create_markdown_artifact, key=key, markdown="\n".join(lines))
