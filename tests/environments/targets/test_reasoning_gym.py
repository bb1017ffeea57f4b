"""reasoning-gym: references and players, splits and draws by content, rewards, and bad input."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from decimal import Decimal, getcontext, localcontext
from pathlib import Path

import pytest

from environments.contract import SPLITS, Action, Draw, Drawable, Generators, ShiftTested, TargetTask
from environments.picking import for_training
from environments.targets.catalogue import check_target_name, load_target
from environments.targets.reasoning_gym import problems
from environments.targets.reasoning_gym.problems import RUN_CODE, check_families, package_score, problem
from environments.targets.reasoning_gym.target import DEFAULT_FAMILIES, NEAR_MISS, ReasoningGymTarget, describe
from environments.targets.reference_check import no_op, oracle, play, validate
from environments.targets.third_party import procedural
from environments.targets.third_party.procedural import Procedural
from errors import TargetError
from models.templates.call_formats import CompactCalls

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is absent: it needs a C compiler"
)


@pytest.fixture(scope="module")
def target() -> ReasoningGymTarget:
    return ReasoningGymTarget()


def answered(target: ReasoningGymTarget, task: TargetTask, text: str) -> tuple[float, bool]:
    score = play(target.environment(), task, lambda environment: CompactCalls().read(text, ()))
    return score.reward, score.success


@needs_package
def test_the_reference_wins_every_task_and_doing_nothing_none(target: ReasoningGymTarget) -> None:
    shift = target.shift_test()
    assert validate(target, oracle).successes == sum(len(target.tasks(split)) for split in SPLITS) == 480
    assert validate(target, oracle, shift).successes == len(shift) == 160
    assert validate(target, no_op).successes == validate(target, no_op, shift).successes == 0


@needs_package
def test_no_content_stands_in_two_places(target: ReasoningGymTarget) -> None:
    draw = Draw(3, 1)
    parts = [
        *(target.tasks(split) for split in SPLITS),
        target.drawn("diagnosis", draw),
        target.drawn("validation", draw),
        target.further(draw, "chain_sum", 20),
        target.shift_test(),
    ]
    contents = [[target.content(task) for task in part] for part in parts]
    flat = [content for part in contents for content in part]
    # The shift test is apart from the fixed splits; a round never plays both.
    assert len(set(flat)) >= len(flat) - 2
    assert not set(contents[2]) & {c for part in (*contents[:2], *contents[3:]) for c in part}, "test is no other's"
    trained = {target.content(target.generate(f, seed)) for f in target.families() for seed in range(60)}
    assert not trained & set(flat)
    shown = {m.content for m in target.examples if m.role == "user"}
    asked = {target.environment().reset(task).messages[0].content for part in parts for task in part}
    assert not shown & asked
    assert not shown & {target.environment().reset(target.generate(f, 0)).messages[0].content for f in DEFAULT_FAMILIES}


@needs_package
def test_rounds_draw_what_no_round_had(target: ReasoningGymTarget) -> None:
    first = target.drawn("validation", Draw(3, 1))
    assert first == target.drawn("validation", Draw(3, 1))
    used = frozenset(target.content(task) for task in (*first, *target.drawn("diagnosis", Draw(3, 1))))
    second = target.drawn("validation", Draw(3, 2, used))
    assert not used & {target.content(task) for task in second}
    assert [task.family for task in first[:5]] == list(DEFAULT_FAMILIES), "of all families from the first on"
    more = target.further(Draw(3, 1), "chain_sum", 3)
    assert more == target.further(Draw(3, 1), "chain_sum", 5)[:3]
    assert not {target.content(t) for t in more} & {target.content(t) for t in first}
    with pytest.raises(TargetError, match="split 'test' is not drawn"):
        target.drawn("test", Draw(3, 1))


@needs_package
def test_the_reward_is_the_packages_and_near_misses_earn_by_likeness(target: ReasoningGymTarget) -> None:
    task = next(t for t in target.tasks("test") if t.family == "word_sequence_reversal")
    right = problem(task.family, task.payload["number"])
    assert right is not None
    assert answered(target, task, right.answer) == (1.0, True)
    backwards = ", ".join(reversed(right.answer.split(", ")))
    near, far = answered(target, task, right.answer[:-1] + "?"), answered(target, task, backwards)
    assert NEAR_MISS >= near[0] > far[0] > answered(target, task, "0")[0]
    assert not near[1]
    assert not far[1]
    kinds = {
        check.kind: check.passed for check in play(target.environment(), task, lambda e: Action(content="0")).checks
    }
    assert kinds == {"solve_word_sequence_reversal": False, "answer_in_full": False}


@needs_package
def test_it_is_all_that_a_round_can_use(target: ReasoningGymTarget) -> None:
    assert isinstance(target, Generators)
    assert isinstance(target, Drawable)
    assert isinstance(target, ShiftTested)
    assert load_target("reasoning-gym").data_hash == target.data_hash == describe()[0].data_hash
    one = load_target("reasoning-gym:chain_sum")
    assert (one.name, {task.family for task in one.tasks("test")}) == ("reasoning-gym:chain_sum", {"chain_sum"})
    assert len(one.environment().examples) == 2 * 6, "one family has all the worked examples"


@needs_package
@pytest.mark.parametrize(
    ("families", "told"),
    [
        ("chain_sums", r"no family 'chain_sums'; did you mean chain_sum"),
        ("", "no family ''"),
        ("countdown", "'countdown' of reasoning-gym runs answers as Python code"),
        ("chain_sum,chain_sum", "'chain_sum' is named twice"),
        *((family, "something else for the same number") for family in ("ransom_note", "isomorphic_strings")),
        ("chain_sum,knight_swap", "'knight_swap' of reasoning-gym asks something else"),
        *((family, "makes all of its questions before") for family in ("acre", "gsm_symbolic", "list_functions")),
        ("word_ladder", "has at most 20,000 questions"),
        ("pool_matrix", "takes no number from 2"),
        *((family, "no question whose own answer") for family in ("boxnet", "graph_color", "propositional_logic")),
        *((family, "no question whose own answer") for family in ("rubiks_cube", "rush_hour")),
        *((family, "several right answers") for family in ("jugs", "kakurasu", "quantum_lock", "sokoban")),
        ("tower_of_hanoi", "several right answers"),
        ("composite", "asks the questions of other families"),
    ],
)
def test_families_that_cannot_be_played_are_refused(families: str, told: str) -> None:
    with pytest.raises(TargetError, match=told):
        load_target(f"reasoning-gym:{families}")


class Failing:
    """Stands for a family of the package that fails to make its questions, or does not take its own answers."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def __getitem__(self, number: int) -> dict[str, str]:
        if self.error is not None:
            raise self.error
        return {"question": f"{number}?", "answer": "yes"}

    def score_answer(self, answer: str, entry: object) -> float:
        return 0.0


@pytest.fixture
def no_question_kept() -> Iterator[None]:
    problem.cache_clear()
    yield
    problem.cache_clear()


@needs_package
@pytest.mark.usefixtures("no_question_kept")
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), r"cannot make question 0 of family 'chain_sum' \(MemoryError\(\)\)"),
        (ValueError("too large"), r"cannot make question 0 of family 'chain_sum' \(ValueError\('too large'\)\)"),
        (None, "takes none of its own answers to the first 32 questions of family 'chain_sum'"),
    ],
)
def test_a_family_that_fails_is_refused_at_its_first_questions(
    error: Exception | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "_dataset", lambda family, harder: Failing(error))
    with pytest.raises(TargetError, match=told):
        check_families(["chain_sum"])


@needs_package
def test_a_curriculum_that_the_package_refuses_is_no_shift_test() -> None:
    assert ReasoningGymTarget(["modulo_grid"]).shift_test() == ()


@needs_package
def test_a_question_that_the_package_fails_to_make_is_not_asked() -> None:
    """Every fortieth of the harder questions of `tsumego` raises RuntimeError."""
    assert len(ReasoningGymTarget(["tsumego"]).shift_test()) == 160


@needs_package
def test_a_question_whose_answer_is_empty_is_not_asked() -> None:
    """An agent has to say something, so nobody could answer it."""
    number = next(n for n in range(1000) if problems._dataset("ab", False)[n]["answer"] == "")
    assert problem("ab", number) is None
    assert problem("ab", number + 1) is not None


def test_a_name_is_known_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "reasoning_gym" else real(name, *rest)
    )
    check_target_name("reasoning-gym:chain_sum,products")
    assert "make install-targets" in describe()[0].how_to_get
    with pytest.raises(TargetError, match="make install-targets"):
        load_target("reasoning-gym:chain_sum")
    with pytest.raises(TargetError, match="make install-targets"):
        check_families(["chain_sum"])


def _running_code(folder: Path) -> Iterator[str]:
    """The modules below `folder` that call what runs a text as code."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in ("eval", "exec", "parse_expr", "sympify", "literal_eval"):
                    yield path.stem


@needs_package
def test_every_family_that_runs_text_as_code_is_refused() -> None:
    """Beside the refused ones: what these modules run is their own, never an answer."""
    spec = importlib.util.find_spec("reasoning_gym")
    assert spec is not None
    assert spec.submodule_search_locations
    found = set(_running_code(Path(next(iter(spec.submodule_search_locations)))))
    own_text = {
        "basic_arithmetic",
        "bitwise_arithmetic",
        "generators_00_49",
        "generators_50_99",
        "number_sorting",
        "propositional_logic",
    }
    assert found - own_text == set(RUN_CODE)


@needs_package
def test_a_verifier_that_raises_gives_no_point(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem("chain_sum", 0)
    assert asked is not None

    class Broken:
        def score_answer(self, answer: str, entry: object) -> float:
            raise ValueError(answer)

    monkeypatch.setattr(problems, "_dataset", lambda family, harder: Broken())
    assert package_score(asked, "7") == 0.0


def test_a_family_with_too_few_questions_is_refused() -> None:
    """Three questions only, of which half are for training."""

    def make(family: str, number: int) -> TargetTask:
        return TargetTask(f"{family}-{number % 3}", "", family, number % 3)

    made = Procedural(["tiny"], make, lambda task: f"{task.seed * 5:x}{task.id}", 8)
    assert [for_training(f"{seed * 5:x}") for seed in range(3)] == [True, True, False]
    said = (
        "'tiny' has 1 questions left for the test split, which needs 8: .* in another split. Leave the family out, or"
    )
    with pytest.raises(TargetError, match=said):
        _ = made.fixed
    assert made.fresh("tiny", 4).split == "generated"


def test_a_new_home_is_only_advised_where_earlier_rounds_took_the_questions() -> None:
    """Each family has as many questions for evaluation as are named."""

    def of(questions: int) -> Procedural:
        def make(family: str, number: int) -> TargetTask:
            return TargetTask(f"{family}-{number % questions}", "", family, number % questions)

        return Procedural(["small"], make, lambda task: f"f{task.seed}", 4)

    with pytest.raises(TargetError, match=r"3 questions left for the validation split.*in the fixed splits and this"):
        of(4 * 5 - 1).check()
    enough = of(4 * 5)
    enough.check()
    first = [task for split in ("diagnosis", "validation") for task in enough.drawn(split, Draw(7, 1))]
    used = frozenset(f"f{task.seed}" for task in first)
    with pytest.raises(TargetError, match=r"earlier rounds\. Begin a new home .TRACE_HOME., or leave the family out"):
        enough.drawn("diagnosis", Draw(7, 2, used))


@needs_package
def test_a_target_whose_first_round_could_not_be_drawn_is_refused_when_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(procedural, "NUMBERS_OF_A_ROUND", 20)
    with pytest.raises(TargetError, match=r"'chain_sum' has \d+ questions left for the diagnosis split.* Leave the"):
        ReasoningGymTarget(["chain_sum"])


@needs_package
def test_other_and_refused_families_are_neither_made_nor_played(target: ReasoningGymTarget) -> None:
    for family in ("countdown", "basic_arithmetic", "nonsense"):
        for ask in (lambda f: target.generate(f, 0), lambda f: target.further(Draw(3, 1), f, 1)):
            with pytest.raises(TargetError, match=f"reasoning-gym has no family '{family}'; its families are word_seq"):
                ask(family)
    with pytest.raises(TargetError, match="'countdown' of reasoning-gym runs answers as Python code"):
        target.environment().reset(TargetTask("countdown-1", "test", "countdown", 1, {"number": 1}))


@needs_package
def test_a_verdict_does_not_depend_on_the_precision_that_another_question_left_behind() -> None:
    """`decimal_arithmetic` computes with twelve digits, and set that for all that its thread did afterwards."""
    asked = problem("decimal_arithmetic", 0)
    assert asked is not None
    off = str(Decimal(asked.answer) + Decimal("0.0010000000000001"))  # by more than the package allows
    scores = set()
    for digits in (12, 28):
        with localcontext(prec=digits):
            scores.add(package_score(asked, off))
    assert scores == {0.0}
    with localcontext(prec=28):
        problem.__wrapped__("decimal_arithmetic", 1)
        assert getcontext().prec == 28
