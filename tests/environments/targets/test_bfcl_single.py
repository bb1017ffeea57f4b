"""BFCL single-turn: references and players, splits by content, reading answers, checks and rewards, and bad input."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from environments.contract import SPLITS, Action, Generators, TargetTask, ToolCall, content_hash
from environments.synthesized.composed import DenseEnvironment
from environments.synthesized.references import References
from environments.targets.bfcl.package import bfcl_folder
from environments.targets.bfcl.single import items, verdicts
from environments.targets.bfcl.single.answers import UnreadableAnswer, read_answer, reference_answer, write_answer
from environments.targets.bfcl.single.items import FAMILIES, LIVE, Item, item_of, live_items, load_items, splits
from environments.targets.bfcl.single.prompt import WORKED, signature
from environments.targets.bfcl.single.target import (
    CAPABILITIES,
    NEAR_MISS,
    SingleTarget,
    describe,
    live_target,
)
from environments.targets.catalogue import load_target
from environments.targets.reference_check import no_op, oracle, play, validate
from errors import EnvironmentFault, TargetError
from models.templates.call_formats import CompactCalls

_missing = [line.missing for line in describe() if line.missing]
pytestmark = pytest.mark.skipif(bool(_missing), reason=f"bfcl-eval is absent: {_missing[:1]}")

# Their possible answers contradict their functions: an argument that the function does not have, or one that must be
# given and for which no value is accepted.
UNANSWERABLE = {"live_simple_106-63-0", "live_simple_112-68-0", "live_multiple_862-181-3", "live_multiple_964-207-0"}


@pytest.fixture(scope="module")
def target() -> SingleTarget:
    return SingleTarget()


def says(text: str) -> Action:
    """What the renderer of small models makes of a turn's text where no tools are offered."""
    return CompactCalls().read(text, ())


def function(name: str, required: dict[str, str], **optional: str) -> dict[str, object]:
    properties = {key: {"type": kind} for key, kind in {**required, **optional}.items()}
    parameters = {"type": "dict", "properties": properties, "required": list(required)}
    return {"name": name, "description": "", "parameters": parameters}


SEND = function("mail.send", {"to": "string", "copies": "integer"}, subject="string")
READ = function("mail.read", {"number": "integer"})
WANTED = {"mail.send": {"to": ["Ann", "ann"], "copies": [2], "subject": ["", "Hi"]}}


def task(
    reference: list[object], category: str = "multiple", functions: tuple[object, ...] = (SEND, READ)
) -> TargetTask:
    payload = {"category": category, "messages": [["user", "?"]], "functions": functions, "reference": reference}
    return TargetTask("made-up", "diagnosis", category, 0, payload)


def answered(target: SingleTarget, asked: TargetTask, text: str) -> tuple[float, bool, set[str]]:
    """Reward, success, and the kinds of the required checks that failed."""
    score = play(target.environment(), asked, lambda environment: says(text))
    return score.reward, score.success, {c.kind for c in score.checks if c.required and not c.passed}


# --- players ---------------------------------------------------------------------------------------------------------


def test_the_reference_wins_and_doing_nothing_never_does(target: SingleTarget) -> None:
    live = live_target()
    assert validate(target, oracle).failed == ()
    assert set(validate(live, oracle).failed) == UNANSWERABLE
    for player in (
        no_op,
        lambda _: Action(malformed="(nothing)"),
        lambda _: says("f(a="),
        lambda _: says("None of it"),
    ):
        assert [validate(each, player).successes for each in (target, live)] == [0, 0]
        assert validate(target, player).mean_reward == 0
    declining = validate(target, lambda _: says("None."))
    assert declining.successes == 240
    assert {key.rpartition("_")[0] for key in declining.failed} == set(FAMILIES) - {"irrelevance"}


def test_bfcls_own_rule_for_declining_stands_in_the_metrics(target: SingleTarget) -> None:
    asked = task([], "irrelevance")
    for text, success, valid in (("none", True, 1), ("No function fits.", False, 1), ("mail.read(number=1)", False, 0)):
        score = play(target.environment(), asked, lambda _, text=text: says(text))  # type: ignore[misc]
        assert (score.success, score.metrics["bfcl_valid"], score.reward) == (success, valid, float(success))


def test_an_episode_is_one_turn_and_the_first_answer_counts(target: SingleTarget) -> None:
    environment = target.environment()
    with pytest.raises(EnvironmentFault):
        environment.step(says("none"))
    opening = environment.reset(task([WANTED])).messages
    assert [message.role for message in opening] == ["user"]
    assert environment.score().reward == 0
    assert environment.step(says("mail.read(number=1)")).done
    assert environment.oracle() is None
    assert environment.step(says('mail.send(to="Ann", copies=2)')).done
    assert not environment.score().success


def test_a_policy_that_calls_natively_has_said_the_same(target: SingleTarget) -> None:
    calls = (ToolCall("mail.send", {"to": "Ann", "copies": 2}),)
    assert play(target.environment(), task([WANTED]), lambda _: Action(tool_calls=calls)).success


# --- splits ----------------------------------------------------------------------------------------------------------


def test_splits_share_no_question_call_or_set_of_functions() -> None:
    where: dict[object, set[str]] = defaultdict(set)
    for split, found in splits().items():
        for item in found:
            for key in (item.question, item.names, *item.calls):
                where[key].add(split)
    assert {len(found) for found in where.values()} == {1}
    assert {len(found) for found in splits().values()} == {514, 228, 498}
    asked = {item.question for found in splits().values() for item in found}
    assert not asked & {item.question for item in live_items()}
    assert len(live_items()) == sum(len(load_items(category)) for category in LIVE) - 7


def test_splits_are_fixed_for_ever(target: SingleTarget) -> None:
    placed = sorted([task.id, task.split] for split in SPLITS for task in target.tasks(split))
    assert content_hash(placed) == "fc75600693450d8b"
    for split in SPLITS:
        first = target.tasks(split)[:40]
        assert {task.family for task in first} == set(FAMILIES)  # `--limit 40` plays them all
        assert all(task.capabilities == CAPABILITIES[task.family] for task in first)


def test_live_is_a_target_of_its_own_that_only_reports(target: SingleTarget) -> None:
    live = load_target("bfcl:single:live")
    assert [len(live.tasks(split)) for split in SPLITS] == [0, 0, 2228]
    assert not isinstance(live, Generators)
    assert isinstance(load_target("bfcl:single"), Generators)
    assert live.data_hash != target.data_hash
    opening = [live.environment().reset(task).messages for task in live.tasks("test")]
    roles = {tuple(message.role for message in messages) for messages in opening}
    assert all(set(found[::2]) == {"user"} and set(found[1::2]) <= {"assistant"} for found in roles)
    assert len(roles) > 1


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("none", []),
        (" None.\n", []),
        ("f()", [{"f": {}}]),
        ('a.b.f(a=5, b="x; y(z=1)"); g(c=[1, -2.5])', [{"a.b.f": {"a": 5, "b": "x; y(z=1)"}}, {"g": {"c": [1, -2.5]}}]),
        ("f(a={'k': [True, None]}, b=(1, 2))", [{"f": {"a": {"k": [True, None]}, "b": (1, 2)}}]),
        ("f(a=celsius, b=true)", [{"f": {"a": "celsius", "b": "true"}}]),  # a bare word is a text, as BFCL reads it
        ("f(a=1)\nf(a=2);", [{"f": {"a": 1}}, {"f": {"a": 2}}]),
    ],
)
def test_answers_are_read(text: str, calls: list[object]) -> None:
    assert read_answer(text) == calls


@pytest.mark.parametrize(
    "text",
    [
        *("", "  ", "f(", "f(a=1) g(a=2)", "I would call f(a=1).", "f(5)", "f(**{'a': 1})", "f(*[1])", "f(a=g(b=1))"),
        *("f(a=1+1)", "f(a=[x for x in y])", "f(a=lambda: 1)", "f(a={[1]: 2})", "f(a={**b})", "f(a=1j)", "f(a=b'x')"),
        *("x = f(a=1)", "f", "'none'", "(lambda: 1)()", "f()()", "import os", "f(a=x.y)", "f(a=b[0])", "f(a={1, 2})"),
        *("f(a=" + "[" * 900, "f(a=" + "-" * 3000 + "1)", "f(a=" + "9" * 5000 + ")", "f(a='\0')", "f(a='\ud800')"),
    ],
)
def test_other_texts_are_unreadable_and_nothing_is_run(target: SingleTarget, text: str) -> None:
    with pytest.raises(UnreadableAnswer):
        read_answer(text)
    reward, success, failed = answered(target, task([WANTED]), text)
    assert (reward, success) == (0, False)
    assert verdicts.READABLE in failed


def test_text_of_the_agent_is_never_evaluated(target: SingleTarget, tmp_path: Path) -> None:
    code = f"__import__('pathlib').Path({str(tmp_path / 'written')!r}).write_text('x')"
    for text in (code, f"f(a={code})", f"mail.send(to={code}, copies=2)", f"f(a=1 + len({code}))"):
        assert not answered(target, task([WANTED]), text)[1]
    assert not list(tmp_path.iterdir())


def test_a_written_answer_is_read_back() -> None:
    values = ['a "b" \\ \n', "é; f(a=1)", True, None, -3, 2.5, [], [[1], {"k": "'"}], {"a b": [1, {"c": False}]}]
    calls = [{"f.g": {f"a{place}": value for place, value in enumerate(values)}}, {"h": {}}]
    assert read_answer(write_answer(calls)) == calls
    assert write_answer([]) == "none"


def test_bfcls_checker_comes_without_its_models() -> None:
    code = (
        "import sys; from environments.targets.bfcl.single.verdicts import bfcl_verdict\n"
        "from environments.targets.bfcl.single.items import load_items\n"
        "item = next(i for i in load_items('simple_python') if '.' in i.functions[0]['name'])\n"
        "assert not bfcl_verdict(item, [{item.functions[0]['name']: {}}])[0]\n"
        "print([m for m in sys.modules if 'model_' in m and 'bfcl' in m or m in ('torch', 'anthropic')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


# --- checks and rewards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ('mail.send(to="Ann", copies=2)', set()),
        ('mail.send(copies=2, to="ANN", subject="Hi")', set()),
        ('mail.send(to="Ann", copies=2, subject="Bye")', {"fill_arguments"}),
        ('mail.send(to="Ann", copies=2.0)', {"fill_arguments"}),
        ('mail.send(to="Ann")', {"fill_arguments"}),
        ('mail.send(to="Ann", copies=2, loud=True)', {"fill_arguments"}),
        ("mail.read(number=2)", {"choose_right_function", "fill_arguments"}),
        ('mail.send(to="Ann", copies=2); mail.read(number=1)', {"make_one_call"}),
        ("none", {"make_one_call", "choose_right_function", "fill_arguments"}),
        ("Sure!", {"write_readable_call", "make_one_call", "choose_right_function", "fill_arguments"}),
    ],
)
def test_checks_say_what_is_lacking(target: SingleTarget, text: str, failed: set[str]) -> None:
    reward, success, found = answered(target, task([WANTED]), text)
    assert found == failed
    assert success is (not failed)
    assert (reward == 1) is success


def test_kinds_follow_what_a_task_needs(target: SingleTarget) -> None:
    alone = answered(target, task([WANTED], "simple_python", (SEND,)), "mail.open()")[2]
    assert alone == {"use_offered_function", "fill_arguments"}
    twice = task([WANTED, {"mail.send": {"to": ["Bob"], "copies": [1]}}], "parallel", (SEND,))
    assert answered(target, twice, 'mail.send(to="Bob", copies=1); mail.send(to="Ann", copies=2)')[1]
    assert answered(target, twice, 'mail.send(to="Ann", copies=2)')[2] == {
        "make_all_calls", "use_offered_function", "fill_arguments",
    }  # fmt: skip
    assert answered(target, task([], "irrelevance"), "mail.read(number=1)")[2] == {"decline_without_function"}


def test_the_reward_rises_with_every_part_and_a_call_too_many_costs_one(target: SingleTarget) -> None:
    texts = (
        "mail.read(number=2)",
        "mail.send(number=2)",
        'mail.send(to="Ann")',
        'mail.send(to="Ann", copies=3, subject="Hi")',
        'mail.send(to="Ann", copies=2)',
    )
    rewards = [answered(target, task([WANTED]), text)[0] for text in texts]
    assert rewards == sorted(set(rewards))
    assert rewards[-1] == 1
    assert rewards[-2] < NEAR_MISS
    assert answered(target, task([WANTED]), 'mail.send(to="Ann"); mail.read(number=1)')[0] < rewards[2]
    assert answered(target, task([WANTED]), "; ".join(["mail.send()"] * 9))[0] == 0


def test_a_training_environment_hands_the_near_miss_on(target: SingleTarget) -> None:
    dense = DenseEnvironment(target.environment(), References(target), near_miss=0.5)
    near = play(dense, task([WANTED]), lambda _: says('mail.send(to="Ann", copies=3)')).reward
    far = play(dense, task([WANTED]), lambda _: says("mail.send(number=3)")).reward
    assert 0 < far < near < 0.5
    assert play(dense, task([WANTED]), oracle).reward == 1


def test_all_required_checks_pass_exactly_when_bfcl_says_so(target: SingleTarget) -> None:
    """On every item of diagnosis, as its reference says and spoiled in six ways: checks and verdict agree."""
    won: dict[str, list[str]] = defaultdict(list)
    for asked in target.tasks("diagnosis"):
        item = item_of(asked.id, asked.payload)
        calls = [dict(call) for call in reference_answer(item.functions, item.reference)]
        if not calls:
            continue
        ((name, given),) = calls[-1].items()
        key = next(iter(given), "")
        spoiled = {
            "reference": calls,
            "order": calls[::-1],
            "one less": calls[:-1],
            "one more": [*calls, calls[0]],
            "other function": [*calls[:-1], {"other": given}],
            "argument gone": [*calls[:-1], {name: {k: v for k, v in given.items() if k != key}}],
            "argument wrong": [*calls[:-1], {name: {**given, key: "\N{SNOWMAN}"}}],
        }
        for how, made in spoiled.items():
            score = play(target.environment(), asked, lambda _, made=made: says(write_answer(made)))  # type: ignore[misc]
            assert score.success == all(c.passed for c in score.checks if c.required), (asked.id, how)
            assert score.success == verdicts.bfcl_verdict(item, made)[0]
            won[how] += [asked.id] * score.success
    everything = won["reference"]
    assert len(everything) == 420
    # The first possible answer of parallel_178 also takes what its third wants, and BFCL does not look back.
    assert set(everything) - set(won["order"]) == {"parallel_178"}
    assert won["one less"] == won["one more"] == won["other function"] == []
    assert len(won["argument gone"]) < 0.1 * len(everything)
    assert len(won["argument wrong"]) < 0.1 * len(everything)


# --- the prompt ------------------------------------------------------------------------------------------------------


def test_signatures_show_types_and_what_may_be_left_out() -> None:
    shown = function("f", {"a": "integer"}, b="string")
    shown["parameters"]["properties"]["c"] = {"type": "array", "items": {"type": "float"}}  # type: ignore[index]
    assert signature({**shown, "description": "Does it."}) == "f(a=integer, [b=string], [c=array of float]) - Does it."


def test_worked_examples_are_one_a_family_right_and_nobodys_items() -> None:
    everything = [item for category in FAMILIES + LIVE for item in load_items(category)]
    names = {name for item in everything for name in item.names}
    for family, (functions, question, answer) in zip(FAMILIES, WORKED, strict=True):
        calls = read_answer(answer)
        assert (len(functions) > 1) is ("multiple" in family)
        assert (len(calls) > 1) is ("parallel" in family)
        assert bool(calls) is (family != "irrelevance")
        reference = tuple({name: {k: [v] for k, v in given.items()} for name, given in call.items()} for call in calls)
        item = Item("", family, (("user", question),), tuple(functions), reference)
        assert verdicts.bfcl_verdict(item, calls)[0]
        assert not item.names & names
        assert all(item.question not in other.question for other in everything)


# --- bad input -------------------------------------------------------------------------------------------------------


def _without(line: str, key: str) -> str:
    return json.dumps({k: v for k, v in json.loads(line).items() if k != key})


@pytest.mark.parametrize(
    ("file", "spoil"),
    [
        ("BFCL_v4_multiple.json", lambda text: text[:-20]),
        ("BFCL_v4_multiple.json", lambda text: _without(text.splitlines()[0], "question")),
        ("BFCL_v4_multiple.json", lambda text: text.replace('"content": "', '"content": 3, "x": "', 1)),
        ("BFCL_v4_multiple.json", lambda text: text.replace('"name": "triangle_properties.get"', '"name": "x"')),
        ("possible_answer/BFCL_v4_multiple.json", lambda text: "\n".join(text.splitlines()[1:])),
        ("possible_answer/BFCL_v4_multiple.json", lambda text: re.sub(r"(truth\": )\[.*\]", r"\1[]", text)),
    ],
)  # fmt: skip
def test_damaged_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, spoil: object) -> None:
    (tmp_path / "data" / "possible_answer").mkdir(parents=True)
    for name in ("BFCL_v4_multiple.json", "possible_answer/BFCL_v4_multiple.json"):
        shutil.copy(bfcl_folder() / "data" / name, tmp_path / "data" / name)
    path = tmp_path / "data" / file
    before = path.read_text(encoding="utf-8")
    path.write_text(spoil(before), encoding="utf-8")  # type: ignore[operator]
    assert path.read_text(encoding="utf-8") != before
    monkeypatch.setattr(items, "bfcl_folder", lambda: tmp_path)
    with pytest.raises(TargetError, match=r"damaged.*make install-targets"):
        load_items.__wrapped__("multiple")
    path.unlink()
    with pytest.raises(TargetError, match=r"cannot read.*make install-targets"):
        load_items.__wrapped__("multiple")


def test_unknown_names_and_incomplete_tasks_are_refused(target: SingleTarget) -> None:
    with pytest.raises(TargetError, match="simple_cobol"):
        load_items("simple_cobol")
    with pytest.raises(TargetError, match="simple_cobol"):
        target.generate("simple_cobol", 1)
    with pytest.raises(TargetError, match="nowhere"):
        target.tasks("nowhere")
    with pytest.raises(TargetError, match=r"made-up.*'messages'"):
        target.environment().reset(TargetTask("made-up", "test", "", 0, {"functions": []}))


def test_an_absent_package_is_described_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Path:
        raise TargetError("bfcl-eval is not installed; run `make install-targets`")

    monkeypatch.setattr(items, "bfcl_folder", absent)
    for cached in (load_items, splits, live_items):
        cached.cache_clear()
    assert all("make install-targets" in line.missing and not line.splits for line in describe())
    with pytest.raises(TargetError, match="install-targets"):
        load_target("bfcl:single")


def test_an_integer_too_long_to_be_written_is_wrong_and_no_fault(target: SingleTarget) -> None:
    (task,) = (t for split in SPLITS for t in target.tasks(split) if t.id == "parallel_multiple_4")
    said = f'integral(function="x", a=1.0, b=5.0); derivative(function="x**2", x=0x{"F" * 3600})'
    assert not play(target.environment(), task, lambda environment: Action(content=said)).success
