"""What a comparison refuses before it plays anything, and the homes of its seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from db import GENERALIST
from errors import ConfigurationError
from flows.cli.main import app
from flows.compare_methods import CompareParameters, check
from settings import Settings, load_settings
from tasks.comparison.results import path_of, reflection_of, settings_hash, write_result
from tasks.measuring.gate_plan import NOOP_TASKS
from tasks.methods import catalogue, trace
from tasks.methods.catalogue import ABLATIONS, EVERY, METHODS, QUICK, chosen
from tasks.methods.preflight import check_budget, check_files, seed_settings
from tasks.methods.trace import (
    after_routing,
    after_training,
    choosing_episodes,
    for_next_training,
    least_episodes,
    proof_episodes,
    share_of,
)
from tasks.round.results import CalibrateResult, ChallengeResult, SynthesizeResult, TrainResult
from tasks.synthesis.calibration import FIGURES
from tests.tasks.comparison.seed_files import figures, seed_result
from tests.tasks.methods.letters_target import SIZE, target
from tests.tasks.methods.seeds_made import TRAIN, small_settings


@pytest.fixture
def home(settings_folder: Path) -> Path:
    return settings_folder / "home"


def test_methods_by_name_with_what_they_need_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(["single", "base"]) == ["base", "trace", "single"]
    assert chosen(["merge"]) == ["trace", "merge-linear", "merge-ties"]
    assert chosen(["placebo"]) == ["trace", "placebo-capabilities", "placebo-rewards"], "drawn among what TRACE left"
    assert chosen(QUICK) == list(QUICK)
    assert chosen(["ablations"]) == ["trace", *(name for name in EVERY if name.startswith("ablation-"))]
    assert not set(chosen([])) & set(EVERY) - set(METHODS)
    assert chosen([GENERALIST]) == ["trace", GENERALIST]
    with pytest.raises(ConfigurationError, match="there is no method 'tarce'; choose from base, noop"):
        chosen(["base", "tarce"])
    monkeypatch.setattr(catalogue.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigurationError, match=r"'gepa' needs the package 'gepa', which is not installed; pip install"
    ):
        chosen([])
    assert chosen(["trace"]) == ["trace"]


def test_every_method_takes_only_what_is_there() -> None:
    for name, method in METHODS.items():
        before = list(METHODS)[: list(METHODS).index(name)]
        assert set(method.needs) <= set(before)
        assert set(method.inherits) <= {"diagnosis", *before}


@pytest.mark.parametrize("name", sorted(ABLATIONS))
def test_an_ablation_changes_what_it_says_and_nothing_else(home: Path, name: str) -> None:
    settings, (_, given) = load_settings(profile="laptop", home=home), ABLATIONS[name]
    method = EVERY[f"ablation-{name}"]
    assert method.changes is not None
    changes = {"train": {"rank": 4, "alpha": 8}} if callable(given) else given
    other = settings.model_copy(update=method.changes(settings))
    assert load_settings(**other.model_dump()) == other, "values that settings allow"

    def flat(given: Settings) -> dict[str, Any]:
        dumped = given.model_dump(mode="json")
        parts = {k: v for k, v in dumped.items() if isinstance(v, dict)}
        return {k: v for k, v in dumped.items() if k not in parts} | {
            f"{k}.{field}": value for k, part in parts.items() for field, value in part.items()
        }

    differ = {k: v for k, v in flat(other).items() if flat(settings)[k] != v}
    wanted = {
        f"{part}.{field}" if isinstance(value, Mapping) else part: new
        for part, value in changes.items()
        for field, new in (value.items() if isinstance(value, Mapping) else [("", value)])
    }
    assert differ
    assert differ.items() <= wanted.items()


def test_an_ablation_of_what_the_settings_do_not_have_is_refused(home: Path) -> None:
    """It would be TRACE once more, under a name that says that something was taken away."""
    night = load_settings(profile="night", home=home, train={"focus": False})
    with pytest.raises(
        ConfigurationError, match=r"ablation-no-focus would be TRACE itself.*'night'.*give --methods base"
    ):
        check_budget(night, target, ["base", "ablation-no-focus"])
    with pytest.raises(ConfigurationError, match="take another ablation"):
        check_budget(night, target, ["ablation-no-focus"])
    for profile, alpha in (("laptop", 8), ("gpu", 4)):
        settings = load_settings(profile=profile, home=home)
        changes = EVERY["ablation-rank-4"].changes
        assert changes is not None
        train = changes(settings)["train"]
        assert (train.rank, train.alpha) == (4, alpha), "the weight of a change stays"
        assert train.alpha / train.rank == settings.train.alpha / settings.train.rank


def test_each_seed_has_an_embedded_home_of_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = small_settings(home, database="postgresql+psycopg://h/x", tracking="http://mlflow:5000")
    seven, eight = (seed_settings(settings, seed, 500) for seed in (7, 8))
    other = seed_settings(settings, 7, 600)
    assert len({seven.home, eight.home, other.home}) == 3
    assert seven.home.parent == eight.home.parent != other.home.parent
    assert home.resolve() in seven.home.parents
    assert (seven.seed, seven.budget) == (7, 500)
    assert seven.database == seven.tracking == "", "a comparison promotes nothing where users are answered"
    assert settings_hash(seven) == settings_hash(eight) != settings_hash(other)
    assert settings_hash(seven) != settings_hash(seed_settings(small_settings(home, router="label"), 7, 500))


def test_a_budget_that_fills_no_group_is_refused(home: Path) -> None:
    settings = small_settings(home)
    least = least_episodes(settings, SIZE, SIZE, False)
    group, calibration, diagnosis = 8, 4 * 6, SIZE
    proof = choosing_episodes(settings) + 2 * 4 + 5 * SIZE
    assert least == diagnosis + calibration + group + proof
    shown = small_settings(home, train=TRAIN | {"demonstrations": 4})
    # The generalist plays the diagnosis (mined, kept for the router), is measured, proven, and compared as a start.
    again, compared = 2 * SIZE + 2 * 4, 2 * (4 + 4)
    assert least_episodes(shown, SIZE, SIZE, False) == least + again + compared
    practises = small_settings(home, train=TRAIN | {"demonstrations": 4, "practice": 2})
    # It plays the diagnosis before it practises, one batch, and its checkpoints; what it practised from may be begun
    # from as well.
    more = SIZE + group + choosing_episodes(settings) + (4 + 4)
    assert least_episodes(practises, SIZE, SIZE, False) == least + again + compared + more

    def check(budget: int, *names: str) -> None:
        check_budget(settings.model_copy(update={"budget": budget}), target, names)

    check(least, "trace", "grpo-target")
    with pytest.raises(ConfigurationError, match=rf"cannot fill a batch of 2 groups x 4 rollouts .* at least {least}"):
        check(least - 1, "base", "trace")
    check(diagnosis + group + choosing_episodes(settings), "grpo-target", "demonstrations-grpo")
    with pytest.raises(ConfigurationError, match="for grpo-target after diagnosis"):
        check(diagnosis + group + choosing_episodes(settings) - 1, "grpo-target")
    check(1, "base", "noop", "examples")
    check(least, "trace", GENERALIST)
    without = settings.model_copy(update={"train": settings.train.model_copy(update={"generalist": 0})})
    with pytest.raises(ConfigurationError, match=r"train\.generalist = 0 makes none; set TRACE_TRAIN__GENERALIST"):
        check_budget(without, target, [GENERALIST])
    check(2 * least, "trace", "trace+gepa")
    with pytest.raises(ConfigurationError, match=rf"for trace\+gepa after diagnosis.* at least {2 * least}"):
        check(2 * least - 1, "trace", "grpo-target", "trace+gepa")  # only what the budget is too small for is named


def test_the_proof_is_paid_for_before_a_training_begins(home: Path) -> None:
    """Live release and candidate on every task, each adapter alone on its own and on the diagnosis; further tasks where
    they are drawn."""
    settings = small_settings(home)
    two = settings.model_copy(update={"evaluation": settings.evaluation.model_copy(update={"validation_trials": 2})})
    assert proof_episodes(two, 7, 10, [], True) == 0
    fresh = 2 * 4 + choosing_episodes(settings)
    assert proof_episodes(two, 7, 10, [(3, 1)], False) == fresh + 2 * 10 + 2 * 3 + 7 + 2 * 10 + 10
    # A training chooses what it begins from: the second of the base and the first's adapter, the third of one more.
    carrying = two.model_copy(update={"train": two.train.model_copy(update={"carry": True})})
    tried = choosing_episodes(settings) // (settings.train.candidates + 1)
    for count, more in ((1, 0), (2, 2 * tried), (3, 5 * tried)):
        own = [(3, 1)] * count
        assert proof_episodes(carrying, 0, 10, own, False) - proof_episodes(two, 0, 10, own, False) == more
    # What is trained has chosen its checkpoint and where it began.
    for done, less in ((1, 3 * tried), (2, (3 + 2 + 3) * tried), (3, (3 + 5 + 6) * tried)):
        left = proof_episodes(carrying, 0, 10, [(3, 1)] * 3, False, done)
        assert proof_episodes(carrying, 0, 10, [(3, 1)] * 3, False) - left == less, done
    # A generalist that came first has played the diagnosis.
    plain = proof_episodes(two, 7, 10, [(3, 1)] * 3, False)
    assert plain - proof_episodes(two, 7, 10, [(3, 1)] * 3, False, played=1) == 7
    few = two.model_copy(update={"evaluation": two.evaluation.model_copy(update={"routing": 2})})
    assert plain - proof_episodes(few, 7, 10, [(3, 1)] * 3, False) == 3 * (7 - 2)
    drawn = two.model_copy(update={"evaluation": two.evaluation.model_copy(update={"own_tasks": 5})})
    # Own tasks of live release, adapter and candidate, as many of each family, where there are too few of them. What
    # settles a fall has what is left.
    for own, short in (((3, 1), 2), ((3, 2), 2), ((1, 3), 6), ((5, 2), 0), ((10, 0), 5)):
        further = proof_episodes(drawn, 7, 10, [own], True) - proof_episodes(two, 7, 10, [own], True)
        assert further == short * 3 * 2, own


def test_what_fell_out_is_not_paid_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three are in: one environment was refused."""
    settings = small_settings(home)
    made = {(SynthesizeResult, c): SynthesizeResult(accepted=c != "b") for c in "abc"}
    context: Any = SimpleNamespace(settings=settings, target=object(), tasks=lambda split: [None] * 10)
    context.found = lambda kind, capability: made.get((kind, capability))
    monkeypatch.setattr(trace, "families_of", lambda context, capability: ())
    assert after_training(context, ["a", "b", "c"]) == proof_episodes(settings, 10, 10, [(10, 0)] * 2, False)
    assert after_training(context, ["b"]) == 0
    # The gate goes by the families of the environment, which may be fewer than those that need the capability.
    families = {"a": ("refund",), "c": ("refund", "move")}
    monkeypatch.setattr(trace, "families_of", lambda context, capability: families[capability])
    context.tasks = lambda split: [SimpleNamespace(family=f) for f in ("refund",) * 3 + ("move",) * 2 + ("swap",)]
    assert after_training(context, ["a", "b", "c"]) == proof_episodes(settings, 6, 6, [(3, 1), (5, 2)], False)
    # One that takes the place of what fell out has no environment yet: what the target says of it, or all.
    del made[SynthesizeResult, "c"]
    assert after_training(context, ["a", "b", "c"]) == proof_episodes(settings, 6, 6, [(3, 1), (6, 0)], False)
    needs = {"refund": ("a",), "swap": ("c", "a")}
    context.target = SimpleNamespace(families=lambda: needs, generate=lambda family, seed: None)
    assert after_training(context, ["a", "b", "c"]) == proof_episodes(settings, 6, 6, [(3, 1), (1, 1)], False)


def test_once_the_router_is_fitted_the_candidate_is_paid_for(home: Path) -> None:
    """On validation and on the further tasks, each once, and doing nothing on some."""
    context: Any = SimpleNamespace(settings=small_settings(home), tasks=lambda split: [None] * 10)
    context.result = lambda kind: ChallengeResult(further={"refund": 4, "move": 3})
    assert after_routing(context) == 10 + 7 + 10
    context.tasks = lambda split: [None] * 400
    assert after_routing(context) == 400 + 7 + NOOP_TASKS


def test_trainings_share_what_is_left_for_them(home: Path) -> None:
    """As much for each that is to come; what one does not use is the others'; no share is too small for a batch."""
    settings = small_settings(home, selection={"most": 3, "delta": 0.1})
    batch = settings.train.groups * settings.train.group_size
    found: dict[tuple[type, str], Any] = {(SynthesizeResult, "b"): SynthesizeResult(accepted=False)}
    context: Any = SimpleNamespace(settings=settings, found=lambda *what: found.get(what))
    names = ["a", "b", "c", "d"]
    assert share_of(context, names, 12 * batch) == 4 * batch
    assert share_of(context, names, 2 * batch + 1) == batch
    assert share_of(context, names, batch - 1) == batch - 1
    found[TrainResult, "a"] = TrainResult(
        adapter="a", sha256="0", steps=1, run="r", ending="steps", chosen=1, verdict=""
    )
    assert share_of(context, names, 11 * batch) == 11 * batch // 2
    found[TrainResult, "c"] = found[TrainResult, "a"]
    assert share_of(context, names, 5 * batch) == 5 * batch


def test_a_training_that_is_not_paid_for_gives_way_with_its_proof(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Better one that is trained than two that are not: the one that is trained last waits for another round."""
    settings = small_settings(home)
    batch, success = settings.train.groups * settings.train.group_size, {"a": 0.2, "b": 0.6}
    given: dict[str, Any] = dict.fromkeys((*FIGURES, "success_rate"), 0.0)
    calibrated = {
        c: CalibrateResult(accepted=True, reason="", **{**given, "success_rate": r}) for c, r in success.items()
    }
    found: dict[tuple[type, str], Any] = {(CalibrateResult, c): result for c, result in calibrated.items()}
    context: Any = SimpleNamespace(settings=settings, target=object())
    context.tasks = lambda split: [SimpleNamespace(family="a")] * 10
    context.settings = settings.model_copy(update={"train": settings.train.model_copy(update={"carry": True})})
    context.found, context.result = lambda *what: found.get(what), lambda *what: found[what]
    monkeypatch.setattr(trace, "_own_families", lambda context, capability: (capability,) * (1 + (capability == "a")))
    both, first = after_training(context, ["a", "b"]), after_training(context, ["b"])
    assert both > first + 2 * batch
    assert for_next_training(context, ["a", "b"], both + 6 * batch) == 3 * batch
    assert for_next_training(context, ["a", "b"], both + 2 * batch) == batch
    assert for_next_training(context, ["a", "b"], both + 2 * batch - 1) == both - first + 2 * batch - 1
    assert for_next_training(context, ["a", "b"], first + 5) == 5
    assert for_next_training(context, ["a", "b"], first - 5) == 0
    found[TrainResult, "b"] = TrainResult(adapter="b", sha256="0", steps=1, run="r", ending="steps", chosen=1)
    assert for_next_training(context, ["a", "b"], after_training(context, ["a", "b"]) + 7) == 7


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"data_hash": "other"}, "data hash other, this comparison letters-1"), ({"budget": 9}, "budget 9, this")],
)
def test_files_of_other_data_or_budget_are_refused(home: Path, changed: dict[str, Any], said: str) -> None:
    settings = seed_settings(small_settings(home), 7, 500)
    fitting = {"target": target.name, "data_hash": target.data_hash, "settings": settings_hash(settings)}
    out = home / "results"
    check_files(out, settings, target, ["gepa"])
    write_result(path_of(out, target.name, 8), seed_result(8, {}, **fitting))
    check_files(out, settings, target, ["gepa"])
    write_result(path_of(out, target.name, 9), seed_result(9, {}, **{**fitting, **changed}))
    with pytest.raises(ConfigurationError, match=said):
        check_files(out, settings, target, ["gepa"])


def test_the_model_that_reflects_is_looked_at_before_anything_is_played(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GEPA asks it with the analyst `checks`, where no round would."""
    monkeypatch.setenv("TRACE_ANALYST__MODEL", "openai/large")
    given: dict[str, Any] = {"target": target.name, "profile": "smoke", "home": home, "budget": 40, "out": home / "out"}
    gepa, base = (CompareParameters(**given, seeds=[7], methods=[name]) for name in ("gepa", "base"))
    settings = seed_settings(check(gepa), 7, 40)
    fitting = {"target": target.name, "data_hash": target.data_hash, "budget": 40, "settings": settings_hash(settings)}
    other = figures(3, reflection=reflection_of(settings) | {"model": "openai/small"})
    write_result(path_of(home / "out", target.name, 8), seed_result(8, {"gepa": other}, **fitting))
    with pytest.raises(ConfigurationError, match=r"gepa reflected by .*openai/small.* this comparison by .*large"):
        check(gepa)
    path_of(home / "out", target.name, 8).unlink()
    monkeypatch.setenv("TRACE_ANALYST__API_KEY_VARIABLE", "NO_SUCH_KEY")
    with pytest.raises(ConfigurationError, match=r"analyst\.api_key_variable .*NO_SUCH_KEY.* is empty"):
        check(gepa)
    check(base)


def test_the_generalist_takes_no_share_of_the_trainings_and_is_proven_on_every_family(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two capabilities and a generalist; what fell out takes no share either."""
    settings = small_settings(home)
    batch = settings.train.groups * settings.train.group_size
    families = {"a": ("refund",), "b": ("move",)}
    found: dict[tuple[type, str], Any] = {(SynthesizeResult, c): SynthesizeResult(accepted=True) for c in families}
    context: Any = SimpleNamespace(settings=settings, target=object(), found=lambda *what: found.get(what))
    context.tasks = lambda split: [SimpleNamespace(family=f) for f in ("refund",) * 3 + ("move",) * 2 + ("swap",)]
    monkeypatch.setattr(trace, "families_of", lambda context, capability: families[capability])
    names = ["a", "b", "c", GENERALIST]  # selection.most = 2
    assert share_of(context, names, 8 * batch) == 4 * batch
    assert after_training(context, names) == proof_episodes(settings, 6, 6, [(3, 1), (2, 1), (6, 3)], False, 1)
    found[SynthesizeResult, "b"] = SynthesizeResult(accepted=False)
    assert after_training(context, ["a", "b", GENERALIST]) == proof_episodes(settings, 6, 6, [(3, 1), (6, 3)], False, 1)
    done = TrainResult(adapter="a", sha256="0", steps=1, run="r", ending="steps", chosen=1, verdict="")
    found[TrainResult, "a"] = done
    assert share_of(context, ["a", "b", GENERALIST], 8 * batch) == 8 * batch
    # Made first it has played the diagnosis, once it is made.
    monkeypatch.setattr(trace.generalist, "comes_first", lambda context: True)
    both = [(3, 1), (6, 3)]
    assert after_training(context, ["a", "b", GENERALIST]) == proof_episodes(settings, 6, 6, both, False, 2)
    found[TrainResult, GENERALIST] = done
    assert after_training(context, ["a", "b", GENERALIST]) == proof_episodes(settings, 6, 6, both, False, 2, 1)
    # Before anything is selected it is shown no more than the smallest round leaves over.
    made: list[object] = []
    monkeypatch.setattr(trace, "before_practice", lambda store, round_id: made[0] if made else None)
    context.store, context.round, played = None, SimpleNamespace(id="round"), 6 * settings.rollout.trials
    assert after_training(context, []) == trace.least_episodes(settings, 6, 6, False) - played > 0
    # So does its practice, whose own first part is played by then, and is left over before.
    context.settings = practises = small_settings(home, train=TRAIN | {"demonstrations": 4, "practice": 2})
    assert share_of(context, [], 9 * batch) == 9 * batch
    assert after_training(context, []) == trace.least_episodes(practises, 6, 6, False) - played
    made.append("what has learnt")
    assert after_training(context, []) == trace.least_episodes(practises, 6, 6, False) - played - 6 > 0
    # The smallest round has a batch of practice among it: the least budget that is accepted pays for a step of it.
    kept = after_training(context, [])
    shares = {more: for_next_training(context, [], kept + more) for more in (-1, 0, batch - 1, batch, 3 * batch)}
    assert shares == {-1: 0, 0: batch, batch - 1: batch, batch: batch, 3 * batch: 3 * batch}


def test_more_seeds_than_anybody_could_wait_for_are_one_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.comparison.seeds.fresh_seeds", lambda *given: pytest.fail("they are listed"))
    for many, said in (("1000000", "less than or equal to 100"), ("-3", "greater than or equal to 1")):
        done = CliRunner().invoke(app, ["compare-methods", "--seeds", many, "--budget", "10"], env={"COLUMNS": "200"})
        assert done.exit_code == 2
        assert f"Invalid value for '--seeds': Input should be {said}" in done.output
