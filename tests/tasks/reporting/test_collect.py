"""All figures of a round, from a made-up store: what was live before it, its candidate, and what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from stored_rounds import DATA, Shop

from db import (
    AdapterRow,
    AdapterState,
    CapabilityRow,
    EnvironmentRow,
    EnvironmentState,
    ReleaseRow,
    ReleaseState,
    Round,
    RouteRow,
    SelectionRow,
    SpendRow,
    TrainingStepRow,
    open_store,
    row_id,
)
from db.schema import TABLES
from models.policy import PolicyIdentity
from settings import Settings, load_settings
from tasks.reporting.analyst import analyst_figures
from tasks.reporting.before_after import release_figures
from tasks.reporting.collect import figures_of
from tasks.reporting.figures import CapabilityFigures, Ending, RoundFigures
from tasks.reporting.headline import headline
from tasks.reporting.history import history_of
from tasks.reporting.nothing_trained import Ended
from tasks.reporting.page import render
from tasks.round.results import (
    CalibrateResult,
    GateResult,
    RegisterResult,
    RouteResult,
    SelectResult,
    StartFigures,
    SynthesizeResult,
    TestResult,
    TrainResult,
    TransferFigures,
)
from tasks.round.stored import StoredRound
from tests.db.store_examples import failure

LOST, WON, HALF = (False, False), (True, True), (True, False)


class Target:
    """Families and the capabilities that they need."""

    def families(self) -> Mapping[str, tuple[str, ...]]:
        return {"refund": ("issue_refund",), "set_address": ("set_address",)}

    def generate(self, family: str, seed: int) -> Any: ...


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with open_store(f"sqlite:///{tmp_path}/trace.db") as store:
        yield Shop(store)


@pytest.fixture
def settings(settings_folder: Path) -> Settings:
    return load_settings(profile="smoke", home=settings_folder / "home")


def prepared(shop: Shop) -> tuple[ReleaseRow, Round]:
    """Release 1 with an adapter for refunds, live, and a round on it that trained one for addresses."""
    first = shop.round()
    shop.tested(first, base=0.0, live=0.0, routed=0.5)
    one = shop.release(1, {"issue_refund": "1"}, of=first, router="r1")
    row = shop.round(one)
    shop.stage(row, SelectResult(selected=["set_address"]))
    shop.stage(row, SynthesizeResult(accepted=True, environment="e"), "set_address")
    done = {"adapter": "a-2", "sha256": "2", "steps": 2, "run": "r", "ending": "solved", "chosen": 2}
    shop.stage(row, TrainResult(**done), "set_address")
    shop.stage(row, RegisterResult(version="1", served_name="set_address@v1", base_success=0.1, adapter_success=0.9,
                                   liveness=0.2), "set_address")  # fmt: skip
    capability = row_id(row.id, "set_address")
    shop.store.put(
        [
            CapabilityRow(id=capability, round_id=row.id, name="set_address", analyst="checks"),
            SelectionRow(round_id=row.id, capability_id=capability, selected=True, mean_cov=0.4, mean_delta=0.6),
            AdapterRow(id="a-2", round_id=row.id, capability_id=capability, base="tiny", state=AdapterState.REGISTERED),
            TrainingStepRow(adapter_id="a-2", step=1, reward=0.5, success=0.5,
                            metrics={"own_reward": 0.2, "own_success": 0.25, "retention_success": 1.0}),
            TrainingStepRow(adapter_id="a-2", step=2, metrics={"retention_success": 0.75}),
        ]
    )  # fmt: skip
    shop.verdict(row, "set_address", "better", "Its own tasks: better.", "What a wrong route costs: -40.0 points.",
                 points=50.0, p=0.01, p_holm=0.01)  # fmt: skip
    return one, row


def finished(shop: Shop, one: ReleaseRow, row: Round, promoted: bool) -> None:
    """The round's candidate, judged, and the test split played: base solves nothing, release 1 one task of each two
    refunds, the candidate all addresses too."""
    state = ReleaseState.LIVE if promoted else ReleaseState.REFUSED
    members, proven = {"issue_refund": "1", "set_address": "2"}, {"unlike": "set_address"}
    two = shop.release(2, members, one, row, ReleaseState.CANDIDATE, router="r2", evidence=proven)
    if promoted:
        shop.store.set_state(ReleaseRow, one.id, ReleaseState.RETIRED)
    shop.store.set_state(ReleaseRow, two.id, state)
    fitted = {"threshold": 0.6, "calibration": 20, "right": 0.95, "mode": "both", "version": "r2", "examples": 60}
    shop.stage(row, RouteResult(candidate=two.id, **fitted))
    shop.verdict(row, "release", "promoted" if promoted else "rejected-regression",
                 "As a whole: +25.0 points.", "refund: fell by 30.0 points.", points=25.0, p=0.02, mde=9.0)  # fmt: skip
    shop.stage(row, GateResult(promoted=["set_address"] if promoted else [], release=2 if promoted else 0))
    base = shop.episodes(row, "base", [LOST, LOST, LOST, LOST])
    live = shop.episodes(row, "one", [WON, LOST, HALF, LOST])
    after = shop.episodes(row, "two", [WON, WON, HALF, WON]) if promoted else live
    chosen = ["issue_refund", "set_address" if promoted else "", "", "set_address" if promoted else ""]
    shop.store.put(
        [
            RouteRow(trajectory_id=i, router_version="r", capability=chosen[k // 2], milliseconds=float(k))
            for k, i in enumerate(after)
        ]
    )
    rate = {"low": 0.0, "high": 1.0}
    shop.stage(
        row,
        TestResult(
            base_ids=base, live_ids=live, routed_ids=after, noop_ids=base[::2], release=2 if promoted else 1, looks=2,
            live={"success": 0.5, **rate}, routed={"success": 0.5, **rate},
        ),
    )  # fmt: skip


def figures(shop: Shop, row: Round, settings: Settings, ended: Ended | None = None) -> RoundFigures:
    ended = ended or Ended(Ending.TRAINED)
    target: Any = Target()
    found = figures_of(StoredRound(shop.store, row), settings, target, PolicyIdentity("tiny", "1"), ended)
    assert RoundFigures.model_validate_json(found.model_dump_json()) == found
    assert headline(found) in render(found).replace("&#39;", "'")
    return found


def test_a_round_whose_candidate_became_live(shop: Shop, settings: Settings) -> None:
    one, row = prepared(shop)
    finished(shop, one, row, promoted=True)
    found = figures(shop, row, settings)
    assert (found.number, found.before, found.after, found.looks, found.data_before) == (2, 1, 2, 2, "")
    assert found.base is not None
    assert found.live is not None
    assert found.routed is not None
    assert [found.base.success, found.live.success, found.routed.success] == [0.0, 0.375, 0.875]
    assert found.gain is not None
    assert found.difference is not None
    assert (found.gain.points, found.difference.points, found.gain.tasks) == (50.0, 87.5, 4)
    assert found.families["set_address"].model_dump(include={"base", "live", "routed"}) == {
        "base": 0.0, "live": 0.0, "routed": 1.0
    }  # fmt: skip

    made = found.release
    assert made is not None
    assert (made.number, made.state, made.verdict) == (2, "live", "promoted")
    assert (made.new, made.kept) == (["set_address"], ["issue_refund"])
    assert (made.points, made.p, made.mde) == (25.0, 0.02, 9.0)
    (capability,) = found.capabilities
    assert (capability.verdict, capability.alone, capability.renewed) == ("promoted", "better", False)
    assert capability.reasons == ["Its own tasks: better.", "What a wrong route costs: -40.0 points."]
    assert (capability.points, capability.adjusted_p, capability.ending) == (50.0, 0.01, "solved")
    assert [(s.reward, s.success, s.retention) for s in capability.steps] == [(0.2, 0.25, 1.0), (None, None, 0.75)]

    router = found.router
    assert router is not None
    assert (router.right, router.calibration, router.threshold, router.unlike) == (0.95, 20, 0.6, "set_address")
    assert router.mode == "both"
    assert router.labels == ["issue_refund", "set_address", "none"]
    assert router.counts == [[1, 0, 1], [0, 2, 0], [0, 0, 0]]
    assert (router.accuracy, router.sent) == (0.75, 0.75)
    assert [(r.round, r.after) for r in found.history] == [(1, 0), (2, None)]


def test_a_candidate_whose_router_was_fitted_again_is_the_rounds_release(shop: Shop, settings: Settings) -> None:
    one, row = prepared(shop)
    members = {"issue_refund": "1", "set_address": "2"}
    first = shop.release(9, members, one, row, ReleaseState.CANDIDATE, router="r2")
    left = {"evidence": {"left": ["refund", "coupon"]}}
    shop.release(10, members, one, row, ReleaseState.CANDIDATE, router="r3", **left)
    shop.store.set_state(ReleaseRow, first.id, ReleaseState.REFUSED)
    shop.verdict(row, "release", "promoted", "As a whole: +25.0 points.")
    found = release_figures(StoredRound(shop.store, row))
    assert found is not None
    assert (found.number, found.verdict, found.left) == (10, "promoted", ["refund", "coupon"])
    (told,) = [r.change for r in history_of(shop.store, "shop") if r.round_id == row.id]
    assert told == "release 10 (candidate): new: set_address; answered as before: refund, coupon"


def test_a_round_whose_candidate_was_refused(shop: Shop, settings: Settings) -> None:
    one, row = prepared(shop)
    finished(shop, one, row, promoted=False)
    found = figures(shop, row, settings)
    assert (found.before, found.after, found.promoted) == (1, 1, [])
    (capability,) = found.capabilities
    assert (capability.verdict, capability.alone) == ("refused", "better")
    assert capability.reasons[-1] == "With the release: refund: fell by 30.0 points."
    assert "What a wrong route costs: -40.0 points." in capability.reasons
    assert found.gain is not None
    assert (found.gain.points, found.gain.p) == (0.0, 1.0)
    assert found.router is not None
    assert found.router.labels == ["issue_refund", "none"]  # of what is live; `right` is the candidate's
    assert headline(found).startswith("Release 2 was refused (rejected-regression): refund: fell by 30.0 points.")


def test_an_adapter_that_was_not_better_alone_keeps_its_verdict(shop: Shop, settings: Settings) -> None:
    _, row = prepared(shop)
    shop.verdict(row, "release", "promoted")
    shop.store.put([_verdict(shop, row, "underpowered")], replace=True)
    (capability,) = figures(shop, row, settings).capabilities
    assert (capability.verdict, capability.alone) == ("underpowered", "underpowered")


def _verdict(shop: Shop, row: Round, verdict: str) -> Any:
    from dataclasses import replace

    from db import VerdictRow

    found = shop.store.row(VerdictRow, round_id=row.id, subject="set_address")
    assert found is not None
    return replace(found, verdict=verdict)


def test_a_release_of_mined_names_has_no_known_truth_for_its_router(shop: Shop, settings: Settings) -> None:
    one, row = prepared(shop)
    finished(shop, one, row, promoted=True)
    target: Any = type("Other", (Target,), {"families": lambda _: {"refund": ("other_name",)}})()
    found = figures_of(
        StoredRound(shop.store, row), settings, target, PolicyIdentity("tiny", "1"), Ended(Ending.TRAINED)
    )
    assert found.router is not None
    assert (found.router.accuracy, found.router.labels, found.router.right) == (None, [], 0.95)
    assert found.router.sent == 0.75
    page = render(found)
    assert "sent 95.0 % of 20 examples right" in page
    assert "unlike all of them is answered by set_address, which solves more" in page


def test_a_task_that_could_not_be_routed_and_was_played_has_no_place_in_the_routers_figures(
    shop: Shop, settings: Settings
) -> None:
    """It did not open when the router looked at it: the base has its episode, which went well."""
    one, row = prepared(shop)
    finished(shop, one, row, promoted=True)
    first = StoredRound(shop.store, row).result(TestResult).routed_ids[:2]  # both trials of a refund
    with shop.store.transaction() as connection:
        routes = TABLES[RouteRow.TABLE]
        connection.execute(routes.delete().where(routes.c.trajectory_id.in_(first)))
    router = figures(shop, row, settings).router
    assert router is not None
    assert router.counts == [[0, 0, 1], [0, 2, 0], [0, 0, 0]]
    assert (router.accuracy, router.sent) == (2 / 3, 2 / 3)


@pytest.mark.parametrize(
    ("mastered", "ending", "verdict"),
    [
        (True, "", "mastered"),
        (False, "", "unsynthesizable"),
        (None, "mastered", "mastered"),
        (None, "steps", "no-gain"),
    ],
)
def test_what_is_mastered_is_no_failure(
    shop: Shop, settings: Settings, mastered: bool | None, ending: str, verdict: str
) -> None:
    row = shop.round()
    shop.stage(row, SelectResult(selected=["a"]))
    shop.store.put(
        [
            CapabilityRow(id=row_id(row.id, "a"), round_id=row.id, name="a", analyst="checks"),
            SelectionRow(
                round_id=row.id, capability_id=row_id(row.id, "a"), selected=True, mean_cov=0.4, mean_delta=0.5
            ),
        ]
    )
    shop.stage(row, SynthesizeResult(accepted=True), "a")
    measured = dict.fromkeys(("mean_reward", "success_rate", "std_reward", "all_success", "all_zero"), 0.5)
    measured |= dict.fromkeys(("informative", "low", "high"), 0.5)
    shop.stage(row, CalibrateResult(accepted=mastered is None, reason="why", mastered=bool(mastered), **measured), "a")
    if mastered is None:
        shop.stage(row, TrainResult(adapter="x", sha256="", steps=0, run="", ending=ending, chosen=0), "a")
    ended = Ended(Ending.NOTHING_TRAINED, "No capability could be trained.")
    found = figures(shop, row, settings, ended)
    assert found.capabilities[0].verdict == verdict
    assert (found.before, found.after, found.release) == (0, 0, None)
    assert found.history[-1].reason == "No capability could be trained."


def test_what_does_not_carry_over_stands_in_the_report_with_its_figures(shop: Shop, settings: Settings) -> None:
    row = shop.round()
    shop.stage(row, SelectResult(selected=["a"]))
    identity = row_id(row.id, "a")
    shop.store.put([CapabilityRow(id=identity, round_id=row.id, name="a", analyst="llm")])
    figured = {"mean_cov": 0.4, "mean_delta": 0.5, "evidence": []}
    shop.store.put([SelectionRow(round_id=row.id, capability_id=identity, selected=True, **figured)])
    verdict = "does-not-transfer: x"
    checked = TransferFigures(step=2, before=0.1, after=0.6, episodes=24, tasks=6, successes=0, verdict=verdict)
    given = {"adapter": "x", "sha256": "", "steps": 2, "run": "", "chosen": 2, "ending": "does-not-transfer"}
    begun = [StartFigures(capability="b", adapter="y", success=0.5, reward=0.5, chosen=True)]
    trained = TrainResult(**given, verdict=checked.verdict, transfer=checked, starts=begun, keeps=["swaps"])
    shop.stage(row, trained, "a")
    (found,) = figures(shop, row, settings, Ended(Ending.NOTHING_TRAINED, "")).capabilities
    assert found.begun == "begins from b 50 %; also keeps swaps"
    assert (found.verdict, found.reasons) == ("does-not-transfer", ["does-not-transfer: x"])
    assert found.transfer is not None
    assert found.transfer.model_dump() == {
        "step": 2, "before": 0.1, "after": 0.6, "episodes": 24, "tasks": 6, "successes": 0,
    }  # fmt: skip


def test_a_withdrawn_environments_adapter_is_not_shown_in_place_of_the_next_versions(
    shop: Shop, settings: Settings
) -> None:
    _, row = prepared(shop)
    capability = row_id(row.id, "set_address")
    # Its id sorts last, so that a look-up by capability would find it.
    gone = AdapterRow(id="z", round_id=row.id, capability_id=capability, base="tiny", state=AdapterState.REJECTED)
    shop.store.put([gone, TrainingStepRow(adapter_id="z", step=1, reward=0.9, success=0.9)])
    found = next(c for c in figures(shop, row, settings).capabilities if c.name == "set_address")
    assert len(found.steps) == 2


def test_what_an_accepted_environment_cost_is_a_figure_and_both_models_are_told(shop: Shop, settings: Settings) -> None:
    row = shop.round()
    given = {"analyst": {"kind": "llm", "model": "rater"}, "synthesizer": {"kind": "llm", "model": "writer"}}
    asked = load_settings(**given)
    spent = [("synthesize", "writer", 6, 0.6), ("synthesize", "writer", 2, 0.2), ("contrast", "rater", 90, 9.0)]
    shop.store.put(
        [
            SpendRow(
                id=f"s{i}", round_id=row.id, stage=stage, model=model, calls=calls, dollars=dollars, prompt_tokens=300,
                sampled_tokens=100,
            )
            for i, (stage, model, calls, dollars) in enumerate(spent)
        ]
    )  # fmt: skip
    none = analyst_figures(asked, shop.store, row.id, None)
    assert none is not None
    assert (none.judge, none.author, none.environments, none.dollars_each) == ("rater", "writer", 0, None)
    shop.store.put([CapabilityRow(id="c", round_id=row.id, name="a", analyst="llm")])
    states = (EnvironmentState.ACCEPTED, EnvironmentState.REJECTED, EnvironmentState.ACCEPTED)
    for i, state in enumerate(states):
        made = EnvironmentRow(
            id=f"e{i}", round_id=row.id, capability_id="c", version=i + 1, kind="llm", state=EnvironmentState.DRAFT,
            spec={"request_hash": "bank:x" if i == 2 else "r"},
        )  # fmt: skip
        shop.store.put([made])
        if state == EnvironmentState.ACCEPTED:
            shop.store.set_state(EnvironmentRow, made.id, EnvironmentState.CHECKED)
        shop.store.set_state(EnvironmentRow, made.id, state)
    found = analyst_figures(asked, shop.store, row.id, None)
    assert found is not None
    assert (found.environments, found.banked) == (2, 1)
    assert (found.dollars_each, found.calls_each, found.tokens_each) == (pytest.approx(0.4), 4.0, 400.0)


def test_a_round_from_before_there_were_releases_is_compared_with_the_base(shop: Shop, settings: Settings) -> None:
    row = shop.round()
    base, routed = shop.episodes(row, "base", [LOST, LOST]), shop.episodes(row, "adapter", [WON, LOST])
    shop.store.add_trajectories([failure(row.id, "errored")])
    shop.stage(row, TestResult(base_ids=base, routed_ids=routed, noop_ids=["errored"]))
    shop.stage(row, GateResult(promoted=[]))
    found = figures(shop, row, settings)
    assert (found.before, found.after, found.live, found.gain) == (None, None, None, None)
    assert found.difference is not None
    assert found.difference.points == 50.0
    assert found.families["refund"].live is None
    assert (found.noop, found.families["refund"].noop) == (None, None), "doing nothing was lost to errors"
    assert found.data_hash == DATA


def test_what_the_round_had_no_place_for_is_postponed_by_whatever_name_it_was_stored(
    shop: Shop, settings: Settings
) -> None:
    row, capability = shop.round(), "c1"
    shop.store.put(
        [
            CapabilityRow(id=capability, round_id=row.id, name="set_address", analyst="checks"),
            SelectionRow(round_id=row.id, capability_id=capability, selected=True, mean_cov=0.4, mean_delta=0.6),
        ]
    )
    shop.stage(row, SelectResult(selected=["set_address"]))
    shop.stage(row, GateResult(promoted=[]))
    (told,) = figures(shop, row, settings).capabilities
    assert told.verdict == "postponed"
    assert "another round may take it" in told.reasons[0]
    stored = told.model_dump(mode="json")
    assert CapabilityFigures.model_validate(stored) == told
    assert CapabilityFigures.model_validate(stored | {"verdict": "over-budget"}) == told, "of an earlier version"
