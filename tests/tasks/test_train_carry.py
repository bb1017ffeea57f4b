"""With `train.carry` a training begins from the weights that do best, and goes on from them whatever happens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest

from db import GENERALIST, AdapterRow, AdapterState, CapabilityRow, EnvironmentRow, EnvironmentState, row_id
from environments.sandbox.workers import ModuleError
from models.adapters.files import WEIGHTS, adapter_digest
from models.training.lora import PROJECTIONS
from tasks import train as stage_file
from tasks.round.adapters import begin_adapter
from tasks.round.context import Context
from tasks.round.results import CalibrateResult, SelectResult, StartFigures, SynthesizeResult, TrainResult
from tasks.round.stage import stage
from tasks.synthesis import starting
from tasks.synthesis.learning import training as training_file
from tests.adapters_made import make_adapter
from tests.tasks.test_train import CAPABILITY, Died, Made, Spec, dying, opened, played
from tests.tasks.test_train_failed import torn

FIRST = "ask_it"
FIGURES = dict.fromkeys(("mean_reward", "std_reward", "all_success", "all_zero", "informative", "low", "high"), 0.5)
GENTLY = 3e-4
SHAPE = {"rank": 4, "alpha": 8, "upper_layers": 2}


@dataclass
class Named(Made):
    """The environment of a capability of that name; the scenarios are the same for all."""

    capability: str
    spec: Spec = field(init=False)

    def __post_init__(self) -> None:
        self.spec = Spec(self.capability, self.capability)


@pytest.fixture
def context(settings_folder: Path, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    """A round that has selected FIRST, then CAPABILITY, with `train.carry`."""
    for context in opened(settings_folder / "home", tiny_model, monkeypatch):
        carrying = context.settings.train.model_copy(update={"carry": True, "carry_rate": GENTLY})
        context.settings = context.settings.model_copy(update={"train": carrying})
        context.registry.client.get_run.return_value.data.metrics = {}  # type: ignore[attr-defined]
        monkeypatch.setattr(stage_file, "stored_environment", lambda store, at, target, name, keep: Named(name))
        given: Any = {"round_id": context.round.id}
        first = CapabilityRow(id=row_id(context.round.id, FIRST), name=FIRST, analyst="checks", **given)
        made = EnvironmentRow(
            id="first", capability_id=first.id, version=1, kind="generators", state=EnvironmentState.DRAFT, **given
        )
        context.store.put([first])
        context.store.put([made])
        select(context)
        synthesized(context)
        calibrated(context)
        yield context


def select(context: Context) -> None:
    @stage("select")
    def selected(context: Context) -> SelectResult:
        return SelectResult(selected=[FIRST, CAPABILITY, "later"])

    selected.do(context)


def synthesized(context: Context) -> None:
    @stage("synthesize")
    def made(context: Context, capability: str) -> SynthesizeResult:
        return SynthesizeResult(accepted=True, environment="first")

    made.do(context, FIRST)


def calibrated(context: Context) -> None:
    """FIRST is the easiest, and so trained before the others."""

    rates = {FIRST: 0.3, CAPABILITY: 0.1, "later": 0.2}

    @stage("calibrate")
    def made(context: Context, capability: str) -> CalibrateResult:
        return CalibrateResult(accepted=True, reason="", success_rate=rates[capability], **FIGURES)

    for capability in rates:
        made.do(context, capability)


def last(figures: Sequence[StartFigures], advised: str | None = None) -> list[StartFigures]:
    return [f.model_copy(update={"chosen": f is figures[-1]}) for f in figures]


def tried(context: Context) -> list[Any]:
    return [row for row in played(context, "evaluation") if row.group_id == starting.START]


def test_a_training_begins_from_what_an_earlier_one_of_the_round_learnt(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the process dies in training: what was chosen stays, and nothing is compared again."""
    first = stage_file.train.do(context, FIRST)
    assert (first.start, first.starts, tried(context)) == ("", [], [])  # there was nothing but the base
    monkeypatch.setattr(starting, "choose", last)
    # What the start was trained for is practised on, in an environment of another id.
    monkeypatch.setattr(stage_file, "families_to_keep", lambda context, made, start: (start.capability,))
    monkeypatch.setattr(stage_file, "keeping", lambda context, made, families: Named(f"{CAPABILITY}+{families[0]}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_file, "step_row", dying(training_file.step_row, 2))
        with pytest.raises(Died):
            stage_file.train.do(context, CAPABILITY)
    rows = tried(context)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting, "compare_starts", None)
        result = stage_file.train._work(context, CAPABILITY)
    assert {r.id for r in tried(context)} == {r.id for r in rows}
    # The base and the adapter met the same own and retention scenarios, which nothing else has.
    assert len(rows) == 2 * (6 + 4)
    assert {r.adapter_id for r in rows} == {None, first.adapter}
    assert len({r.task_id for r in rows}) == 10
    every = [*played(context, "training"), *played(context, "evaluation")]
    others = {r.task_id for r in every if r.group_id != starting.START}
    assert not {r.task_id for r in rows} & others
    # What it began from is told wherever it is looked for, and is step 0 of its checkpoints.
    assert [(f.capability, f.adapter, f.chosen) for f in result.starts] == [
        ("", "", False),
        (FIRST, first.adapter, True),
    ]
    weights = context.folder / "training" / CAPABILITY / "weights" / "step-0"
    assert result.start == first.sha256 == adapter_digest(weights)
    assert result.began_from(CAPABILITY) == f"the adapter for {FIRST}"
    # From zero it learns at one rate, from an adapter at the other.
    rates = {a.id: a.config["learning_rate"] for a in context.store.rows(AdapterRow)}
    assert (rates[first.adapter], rates[result.adapter]) == (context.settings.train.learning_rate, GENTLY)
    row = context.store.row(AdapterRow, id=result.adapter)
    assert row is not None
    assert (row.config["start"], row.config["start_adapter"]) == (first.sha256, first.adapter)
    assert row.config["keeps"] == result.keeps == [FIRST]
    trained = {r.environment for r in played(context, "training") if r.adapter_id == row.id}
    assert (trained, {r.environment for r in rows}) == ({f"{CAPABILITY}+{FIRST}"}, {CAPABILITY})
    sent = [call.kwargs for call in context.registry.client.log_batch.call_args_list]  # type: ignore[attr-defined]
    assert ("start/from", FIRST) in {(p.key, p.value) for given in sent for p in given.get("params", ())}
    shown = {m.key: m.value for given in sent for m in given.get("metrics", ())}
    assert shown[f"start/{FIRST}_success"] == result.starts[1].success
    assert shown["start/base_reward"] == result.starts[0].reward
    assert context.policy.adapters == ()


def test_where_the_base_does_best_a_training_begins_from_zero(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the champion could be trained on."""
    row = stored(context, CAPABILITY, context.folder / "champion")
    context.__dict__["parent"] = SimpleNamespace(members={CAPABILITY: {"adapter_id": row.id}})
    monkeypatch.setattr(starting, "choose", lambda figures, advised: last([*figures[1:], figures[0]]))
    begun: list[Any] = []
    result = TrainResult(adapter="a", sha256="s", steps=3, run="r", ending="steps", chosen=2)
    monkeypatch.setattr(stage_file, "train_on", lambda context, *given: begun.append(given) or result)
    monkeypatch.setattr(stage_file, "check_alive", lambda context, *given: None)
    assert stage_file.train._work(context, CAPABILITY) == result
    ((course, start),) = begun
    assert start is None
    assert [(f.capability, f.chosen) for f in course.starts] == [(CAPABILITY, False), ("", True)]


def stored(context: Context, name: str, folder: Path, **changed: Any) -> AdapterRow:
    """An adapter as a member of a release is stored."""
    make_adapter(
        context.base.policy.model, folder, layers=(1, 2), modules=PROJECTIONS[1:] if name == "few" else PROJECTIONS
    )
    row = AdapterRow(
        id=f"{name}-id",
        round_id=context.round.id,
        base="b",
        base_revision="r",
        state=AdapterState.TRAINED,
        config=SHAPE | changed,
        sha256=adapter_digest(folder),
        path=str(folder.relative_to(context.settings.folder)),
    )
    context.store.put([row])
    return row


def test_what_may_be_begun_from(
    context: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The champion, what was trained before and is of use, and members whose shape and files are right."""

    @stage("train")
    def trained(context: Context, capability: str, chosen: int) -> TrainResult:
        return TrainResult(adapter=f"{capability}-id", sha256="", steps=3, run="", ending="steps", chosen=chosen)

    names = ("fits", "wide", "few", "changed", "gone", FIRST, "later", "zeta")
    rows = {
        name: stored(context, name, context.folder / name, **({"rank": 8} if name == "wide" else {})) for name in names
    }
    (context.folder / "changed" / WEIGHTS).write_bytes((context.folder / "fits" / WEIGHTS).read_bytes()[:-4] + b"oops")
    (context.folder / "gone").rename(context.folder / "elsewhere")
    members = {name: {"adapter_id": rows[name].id} for name in ("zeta", "wide", "few", "gone", "fits", "changed")}
    context.__dict__["parent"] = SimpleNamespace(members=members | {CAPABILITY: {"adapter_id": "champion"}})
    before = {name: trained._work(context, name, 2) for name in (FIRST, CAPABILITY, "later")}
    found_as_stored = Context.found

    def found_of(self: Context, kind: Any, *of: str) -> Any:
        return before.get(*of) if kind is TrainResult else found_as_stored(self, kind, *of)

    monkeypatch.setattr(Context, "found", found_of)
    champion = starting.Start(CAPABILITY, "champion", context.folder)
    wanted = training_file.training_settings(context.settings)
    with caplog.at_level("INFO", "trace"):
        found = starting.starts_for(context, CAPABILITY, wanted, champion)
    assert [start.adapter for start in found] == ["champion", "later-id", f"{FIRST}-id", "fits-id", "zeta-id"]
    said = caplog.text
    assert "from the adapter for wide: it has rank 8, train.rank is 4" in said
    assert "from the adapter for few: it changes down_proj, gate_proj, k_proj, o_proj, up_proj, v_proj, a tr" in said
    assert "its files were changed" in said
    assert "which is gone" in said
    # An adapter that is no better than its start is nothing to begin from; more than a few are not compared.
    before = {FIRST: trained._work(context, FIRST, 0)}
    monkeypatch.setattr(starting, "MOST", 2)
    with caplog.at_level("INFO", "trace"):
        found = starting.starts_for(context, CAPABILITY, wanted, None)
        assert [start.adapter for start in found] == ["fits-id", "zeta-id"]
        starting.starts_for(context, CAPABILITY, wanted, champion)
    assert "only 2 adapters are compared, left out: zeta" in caplog.text


def test_a_generalist_that_came_first_is_the_earliest_of_a_rounds_adapters(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own calibration has no figures. Of equals the latest is begun from, which has learnt the most."""
    names = (GENERALIST, FIRST, "later")
    given: dict[str, Any] = {"sha256": "", "steps": 3, "run": "", "ending": "steps", "chosen": 3}
    trained = {n: TrainResult(adapter=stored(context, n, context.folder / n).id, **given) for n in names}
    unmeasured = CalibrateResult(accepted=True, reason="", success_rate=0.0, **dict.fromkeys(FIGURES, 0.0))
    result_as_stored = Context.result

    def result_of(self: Context, kind: Any, *of: str) -> Any:
        if kind is SelectResult:
            return SelectResult(selected=[FIRST, CAPABILITY, "later", GENERALIST])
        return unmeasured if of == (GENERALIST,) else result_as_stored(self, kind, *of)

    monkeypatch.setattr(Context, "result", result_of)
    monkeypatch.setattr(Context, "found", lambda self, kind, *of: trained.get(*of))
    found = starting.starts_for(context, CAPABILITY, training_file.training_settings(context.settings), None)
    assert [start.capability for start in found] == ["later", FIRST, GENERALIST]


def test_the_live_generalist_is_compared_however_many_there_are(
    context: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Calibration plays it behind a champion: a training with its advice could not begin from it. A blend is nothing
    that could be begun from, and nothing is wrong with that."""
    names = ("buy_bread", "call_home", "dig_holes", GENERALIST)
    members = {name: {"adapter_id": stored(context, name, context.folder / name).id} for name in names}
    blends = {"blend-buy_bread-2-call_home-2": {"adapter_id": ""}}
    context.__dict__["parent"] = SimpleNamespace(members=members | blends | {CAPABILITY: {"adapter_id": "champion"}})
    monkeypatch.setattr(starting, "MOST", 3)
    champion = starting.Start(CAPABILITY, "champion", context.folder)
    with caplog.at_level("INFO", "trace"):
        found = starting.starts_for(context, CAPABILITY, training_file.training_settings(context.settings), champion)
    assert [start.capability for start in found] == [CAPABILITY, "buy_bread", GENERALIST]
    assert "only 3 adapters are compared, left out: call_home, dig_holes" in caplog.text
    assert "blend" not in caplog.text


def test_a_start_that_has_come_apart_is_left_out(context: Context) -> None:
    torn_apart = context.folder / "torn"
    row = stored(context, "torn", torn_apart)
    torn(torn_apart)
    context.store.set_state(AdapterRow, row.id, row.state, sha256=adapter_digest(torn_apart))
    start = starting.Start("torn", row.id, torn_apart)
    (base,) = starting.compare_starts(context, Named(CAPABILITY), [start])  # type: ignore[arg-type]
    assert base.chosen
    assert not base.adapter
    assert context.policy.adapters == ()


def test_what_a_module_loses_every_episode_with_is_no_start_and_ends_it_where_it_is_the_base(
    context: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    losing = {"told"}

    def played(context: Context, environment: Any, start: starting.Start | None, tasks: Any) -> pd.DataFrame:
        gone = (start.capability if start else "base") in losing
        columns = {"task": [t.id for t in tasks], "success": float("nan") if gone else 1.0, "reward": 1.0}
        return pd.DataFrame(columns | {"error_boundary": "sandbox" if gone else None, "error": "KeyError: 'slot'"})

    monkeypatch.setattr(starting, "_played", played)
    start = starting.Start("told", "a", context.folder)
    (base,) = starting.compare_starts(context, Named(CAPABILITY), [start])  # type: ignore[arg-type]
    assert base.chosen
    assert "cannot begin from told: the written module ended all " in caplog.text
    losing.add("base")
    with pytest.raises(ModuleError, match="to show what the base is worth as a start"):
        starting.compare_starts(context, Named(CAPABILITY), [start])  # type: ignore[arg-type]


def test_with_carry_the_easiest_is_trained_first(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"never": (0.0, 0.06), "often": (0.4, None), "advised": (0.0, 0.3), "rarely": (0.1, None)}
    found = {
        name: CalibrateResult(accepted=True, reason="", success_rate=rate, hinted=hinted, **FIGURES)
        for name, (rate, hinted) in rates.items()
    }
    monkeypatch.setattr(Context, "result", lambda self, kind, *of: found[of[0]])
    assert starting.training_order(context, list(rates)) == ["often", "rarely", "advised", "never"]
    alone = context.settings.model_copy(update={"train": context.settings.train.model_copy(update={"carry": False})})
    monkeypatch.setattr(context, "settings", alone)
    assert starting.training_order(context, list(rates)) == list(rates)


def test_what_the_budget_does_not_train_compares_no_starts(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be paid for by what proves the others."""
    batch = context.settings.train.groups * context.settings.train.group_size
    monkeypatch.setattr(stage_file, "starts_of", lambda *given: pytest.fail("played"))
    monkeypatch.setattr(context, "budget", SimpleNamespace(for_training=lambda adapter: batch - 1))
    result = stage_file.train._work(context, CAPABILITY)
    assert (result.steps, result.ending, result.goes_on) == (0, "budget", False)
    assert "did not pay for a first step" in result.unused
    assert not context.store.rows(AdapterRow, id=result.adapter)


def test_what_has_begun_is_chosen_from_whatever_the_choice_has_taken(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while its checkpoints are held against each other, a training would be none the next time."""
    adapter = stage_file.course_of(context, CAPABILITY).adapter
    begin_adapter(context, adapter, None, None, {})
    monkeypatch.setattr(stage_file, "starts_of", Mock(side_effect=Died))
    monkeypatch.setattr(context, "budget", SimpleNamespace(for_training=lambda adapter: 0))
    with pytest.raises(Died):
        stage_file.train._work(context, CAPABILITY)
