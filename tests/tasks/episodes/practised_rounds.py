"""A made-up round of the shop that diagnosed, trained one adapter and made a release, with its episodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from db import (
    AdapterRow,
    AdapterState,
    CapabilityRow,
    CheckRow,
    EnvironmentRow,
    EnvironmentState,
    GatePlanRow,
    LabelRow,
    Round,
    SelectionRow,
    Store,
    TrajectoryRow,
    VerdictRow,
    row_id,
)
from models.adapters.files import RegisteredAdapter
from models.adapters.registry import Registry
from tasks.reporting.figures import CapabilityFigures, ReleaseFigures, RoundFigures
from tasks.round.results import (
    ChallengeResult,
    EvaluateResult,
    GateResult,
    RegisterResult,
    RolloutResult,
    SelectResult,
    StageResult,
    SynthesizeResult,
    TestResult,
    TrainResult,
)
from tasks.round.stored import StoredRound
from tests.adapters_plain import registered

CAPABILITY, ADAPTER, ENVIRONMENT = "refund_payment", "adapter-1", "environment-1"
ASKED = "Refund order 264 <script>alert(1)</script>"


@dataclass
class Practised:
    """A store with one such round; `steps`, `groups` of a step and `size` of a group say how much it trained."""

    store: Store
    steps: int = 2
    groups: int = 2
    size: int = 4
    run: str = ""
    seed: int = 7

    def __post_init__(self) -> None:
        self.round: Round = self.store.start_round("shop", "data-one", self.seed, "laptop", {}, "0.1.0")
        capability = row_id(self.round.id, CAPABILITY)
        self.store.put([CapabilityRow(id=capability, round_id=self.round.id, name=CAPABILITY, analyst="checks")])
        spec = {"id": ENVIRONMENT}
        self.store.put(
            [
                EnvironmentRow(id=ENVIRONMENT, round_id=self.round.id, capability_id=capability, version=1,
                               kind="generators", spec=spec, state=EnvironmentState.ACCEPTED)
            ]
        )  # fmt: skip
        self.store.put(
            [AdapterRow(id=ADAPTER, round_id=self.round.id, capability_id=capability, base="tiny",
                        state=AdapterState.TRAINED, config={"seed": self.seed, "group_size": self.size})]
        )  # fmt: skip
        self._diagnosed(capability)
        self._trained()
        self._tested()

    @property
    def stored(self) -> StoredRound:
        return StoredRound(self.store, self.round)

    def figures(self) -> RoundFigures:
        """What its report would show."""
        tried = CapabilityFigures(
            name=CAPABILITY, mean_cov=0.5, mean_delta=0.6, runs_passed=10, verdict="promoted", alone="better",
            points=37.5, adjusted_p=0.0002, base_success=0.1, adapter_success=0.9, adapter="refund_payment@v1-abc",
        )  # fmt: skip
        skipped = CapabilityFigures(name="set_address", mean_cov=0.0, mean_delta=0.0, runs_passed=0,
                                    verdict="not-selected", selected=False)  # fmt: skip
        made = ReleaseFigures(number=3, verdict="promoted", points=22.2, p=0.001, new=[CAPABILITY])
        return RoundFigures(
            round=self.round.id, target="shop", data_hash="data-one", seed=7, number=self.round.number, before=0,
            after=3, capabilities=[tried, skipped], release=made,
        )  # fmt: skip

    def stage(self, result: StageResult, *of: str) -> None:
        stage = self.store.stage(self.round.id, ":".join([result.stage, *of]))
        assert stage.claim()
        stage.finish(result.model_dump(mode="json"))

    def episode(self, key: str, task: str, seed: int, trial: int, reward: float | None, **given: Any) -> str:
        """Stores one episode; without a reward it was lost to the provider."""
        lost = reward is None
        row = TrajectoryRow(**{
            "id": row_id(self.round.id, key, task, seed, trial), "round_id": self.round.id, "purpose": "evaluation",
            "target": "shop", "data_hash": "data-one", "environment": "shop", "task_id": task,
            "family": task.rpartition("-")[0], "split": "test", "seed": seed, "trial": trial, "policy_id": key,
            "base": "tiny", "termination": "error" if lost else "done", "reward": reward,
            "success": None if lost else reward >= 1.0,
            "error_boundary": "provider" if lost else None, "error": "no answer" if lost else None,
            "sampled_tokens": 9, "seconds": 0.5,
            "messages": [
                {"role": "user", "content": ASKED},
                {"role": "assistant", "content": "", "tool_calls": [{"name": "refund", "arguments": {"order": 264}}]},
                {"role": "tool", "content": "ok", "name": "refund"},
            ],
            "checks": [] if lost else [CheckRow("refunded", CAPABILITY, True, reward >= 1.0, "refund {'order': 264}")],
            **given,
        })  # fmt: skip
        self.store.add_trajectories([row])
        return row.id

    def _diagnosed(self, capability: str) -> None:
        ids = [
            self.episode("base", f"{family}-{i}", 0, 0, 1.0 if family == "status" else 0.0, purpose="diagnosis",
                         split="diagnosis")
            for family in ("refund", "status")
            for i in range(2)
        ]  # fmt: skip
        self.stage(RolloutResult(trajectories=ids, lost=0, success=0.5))
        self.store.put(
            [
                LabelRow(round_id=self.round.id, run=run, trajectory_id=i, capability_id=capability,
                         label="LACKING" if at < 1 + (run == 0) else "NA")
                for run in range(3)
                for at, i in enumerate(ids)
            ]
        )  # fmt: skip
        evidence = [{"id": ids[1], "votes": 3}]
        self.stage(SelectResult(selected=[CAPABILITY]))
        self.store.put(
            [SelectionRow(round_id=self.round.id, capability_id=capability, selected=True, rank=0, mean_cov=0.5,
                          mean_delta=0.6, runs_passed=10, runs=10, evidence=evidence)]
        )  # fmt: skip

    def _trained(self) -> None:
        for step in range(self.steps):
            for group in range(self.groups):
                for trial in range(self.size):
                    self.episode(
                        "policy", f"refund-{100 * step + group}", 100_003 * self.seed + step, trial,
                        (trial % 4) / 3 if group else 0.0, purpose="training", environment=ENVIRONMENT,
                        split="generated", adapter_id=ADAPTER, group_id="hinted" if trial == 2 else None,
                    )  # fmt: skip
        self.stage(SynthesizeResult(accepted=True, environment=ENVIRONMENT), CAPABILITY)
        trained = {"adapter": ADAPTER, "sha256": "", "steps": self.steps, "run": self.run}
        self.stage(TrainResult(**trained, ending="steps", chosen=1), CAPABILITY)

    def judged(self, registry: Registry, place: Path, value: float = 1.0) -> RegisteredAdapter:
        """Its adapter registered, judged against release 2 as +37.5 points, and in release 3, which was promoted."""
        adapter = registered(registry, place, CAPABILITY, self.run, value)
        rates = {"base_success": 0.1, "adapter_success": 0.9}
        self.stage(
            RegisterResult(version=adapter.version, served_name=adapter.served_name, liveness=0.4, **rates), CAPABILITY
        )
        live = [self.episode("live", t, 2, 0, 0.0, split="validation") for t in ("refund-v", "status-v")]
        alone = [self.episode("alone", "refund-v", 2, 0, 1.0, split="validation")]
        rewards = {"refund-v": 1.0, "status-v": 0.0}
        after = [self.episode("after", task, 2, 0, r, split="validation") for task, r in rewards.items()]
        judged = {"verdicts": {CAPABILITY: "better"}, "passed": [CAPABILITY], "look": 1, "alpha": 0.05}
        self.stage(ChallengeResult(live_ids=live, alone_ids={CAPABILITY: alone}, **judged))
        self.stage(EvaluateResult(live_ids=live, routed_ids=after))
        self.stage(GateResult(promoted=[CAPABILITY], verdicts={CAPABILITY: "better", "release": "promoted"}, release=3))
        at = {"round_id": self.round.id}
        self.store.put([VerdictRow(**at, subject="release", verdict="promoted", points=22.2, p=0.001, mde=8.0)])
        self.store.put([GatePlanRow(**at, sha256="hash", rules={"against": 2})])
        return adapter

    def _tested(self) -> None:
        base = [self.episode("base", t, 1, 0, r) for t, r in zip(("refund-a", "status-a", "status-b"), (0.0, 1.0, 1.0),
                                                                 strict=True)]  # fmt: skip
        after = [self.episode("routed", "refund-a", 1, 0, 1.0), self.episode("routed", "status-a", 1, 0, 0.5), base[2]]
        self.stage(TestResult(base_ids=base, live_ids=base, routed_ids=after, release=3))
