"""Modules written by hand as a model might write them, five flawed in one way each; the sound ones are accepted in
`test_weakenings.py`."""

import hashlib
import json
import re
from functools import partial
from pathlib import Path

import pytest

from environments.contract import Action, Environment, ToolCall
from environments.sandbox.confinement import SPAWNER
from environments.sandbox.workers import SandboxLimits
from environments.synthesized import module_files
from environments.synthesized.module_files import (
    load_module,
    parse_line,
    play_by_hand,
    save_module,
    validate_file,
    validate_module,
)
from environments.synthesized.modules import SandboxedModule
from environments.synthesized.static_checks import static_faults
from environments.validation.checks import Limits, ValidationVerdict
from errors import EnvironmentFault, SandboxError, TargetError

MODULES = Path(__file__).with_name("modules")
EXAMPLES = Path(__file__).parents[3] / "environments" / "synthesized" / "worked_examples"
EXAMPLE = EXAMPLES / "check_before_cancel.py"
SOUND = [*sorted(EXAMPLES.glob("[a-z]*.py")), *sorted(MODULES.glob("sound_*.py"))]
FLAWED = {
    "leaky_reward": ["constant_done", "full reward without success", "red team: claim "],
    "non_deterministic": ["determinism: "],
    "unsolvable": ["oracle: success 0 "],
    "trivial": ["constant_done: success 1", "red team: claim "],
    "escaping": ["static: line 3: import of os is forbidden"],
}


@pytest.mark.parametrize("name", FLAWED)
def test_flawed_modules_are_refused_with_the_reason(name):
    verdict = validate_file(MODULES / f"flawed_{name}.py")
    assert not verdict.accepted
    found = "\n".join(verdict.reasons)
    for reason in FLAWED[name]:
        assert reason in found


QUICK = SandboxLimits(call_seconds=0.1)
FEW = Limits(distinct=12, searched=24, episodes=12, attack_seeds=1, replayed=6)


def test_scenarios_that_follow_the_order_of_a_set_are_refused():
    source = EXAMPLE.read_text().replace("rng.choice(sorted(_REASONS))", "rng.choice(list(set(_REASONS)))")
    assert source != EXAMPLE.read_text()
    verdict = validate_module(source, FEW)
    assert "determinism: equal seeds gave different scenarios" in verdict.reasons[0]


def test_a_module_that_pays_nothing_for_success_is_refused():
    source = EXAMPLE.read_text().replace("return 1.0 if told else 0.2\n", "return 0.0 if told else 0.2\n")
    assert source != EXAMPLE.read_text()
    (reason,) = validate_module(source, FEW).reasons
    assert reason.startswith("level 0: oracle: 12 of its 12 successes have a reward below 0.95, the lowest 0: ")


def test_there_are_five_of_each():
    assert len(SOUND) == len(FLAWED) == len(list(MODULES.glob("flawed_*.py"))) == 5


@pytest.fixture(scope="module")
def module():
    opened = SandboxedModule(EXAMPLE.read_text())
    yield opened
    opened.close()


def test_a_sandboxed_environment_plays_like_any_other(module):
    environment = module.environment()
    assert isinstance(environment, Environment)
    task = module.scenario(3)
    assert module.scenario(3) == task
    observation = environment.reset(task)
    assert observation.messages[0].role == "user"
    while (action := environment.oracle()) is not None:
        observation = environment.step(action)
    score = environment.score()
    assert score.success
    assert score.reward == 1.0
    assert {check.kind for check in score.checks} == {"check_before_cancel"}
    assert environment.step(Action(content="again")).done


def test_success_is_judged_outside_whatever_the_module_says():
    head = "def reward(scenario, state, log):"
    generous = f"{head}\n    return 1.0\n\n\ndef _other(scenario, state, log):"
    source = EXAMPLE.read_text().replace(head, generous)
    module = SandboxedModule(source)
    environment = module.environment()
    environment.reset(module.scenario(0))
    score = environment.score()
    module.close()
    assert score.reward == 1.0
    assert not score.success


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "is missing"),
        ({"order_id": True}, "must be of type string"),
        ({"order_id": "W1", "reward": 1}, "unknown argument 'reward'"),
        ({"order_id": float("nan")}, "not finite"),
    ],
)
def test_bad_arguments_are_answered_and_never_reach_the_module(module, arguments, said):
    environment = module.environment()
    environment.reset(module.scenario(1))
    answer = environment.step(Action(tool_calls=(ToolCall("get_order", arguments, "call_0"),)))
    assert said in json.loads(answer.messages[0].content)["error"]
    assert not answer.done


def test_a_task_of_another_version_is_refused(module):
    environment = module.environment()
    task = module.scenario(0)
    object.__setattr__(task, "payload", {**task.payload, "code_hash": "0" * 64})
    with pytest.raises(TargetError, match="another version"):
        environment.reset(task)


def test_accepted_modules_are_files_that_load_again_and_changed_ones_are_not(tmp_path):
    source = EXAMPLE.read_text()
    verdict = validate_module(source, Limits(distinct=20, searched=40, episodes=20, attack_seeds=1, replayed=4))
    path = save_module(tmp_path, source, verdict)
    loaded = load_module(path)
    assert loaded.code_hash == verdict.figures["code_hash"]
    loaded.close()
    path.write_text(source + "\n# changed\n")
    with pytest.raises(TargetError, match="changed after"):
        load_module(path)
    with pytest.raises(EnvironmentFault, match="refused"):
        save_module(tmp_path, source, validate_file(MODULES / "flawed_escaping.py"))
    with pytest.raises(TargetError, match="no environment at"):
        load_module(tmp_path / "missing.py")


def accepted(source):
    figures = {"capability": "copied", "code_hash": hashlib.sha256(source.encode()).hexdigest()}
    return ValidationVerdict(True, (), figures)


def test_a_module_is_kept_with_the_ends_of_lines_that_it_was_judged_with(tmp_path):
    source = EXAMPLE.read_text().replace("\n", "\r\n")
    loaded = load_module(save_module(tmp_path, source, accepted(source)))
    assert loaded.source == source
    loaded.close()


@pytest.mark.parametrize("verdict", ['{"figures"', "[]", '{"figures": {}}', "\xff"])
def test_a_verdict_that_cannot_be_read_is_told_before_anything_is_started(tmp_path, monkeypatch, verdict):
    source = EXAMPLE.read_text()
    path = save_module(tmp_path, source, accepted(source))
    path.with_suffix(".json").write_bytes(verdict.encode("latin-1"))
    monkeypatch.setattr(SPAWNER, "run", lambda level: pytest.fail("a worker was started"))
    with pytest.raises(TargetError, match="is no verdict on a module"):
        load_module(path)


def test_a_file_that_is_no_text_is_told(tmp_path):
    path = tmp_path / "module.py"
    path.write_bytes(b'"""\xff"""')
    for read in (load_module, validate_file):
        with pytest.raises(TargetError, match="no text in UTF-8"):
            read(path)


def test_tools_must_be_the_targets(module):
    other = json.loads(json.dumps(module.tools))
    other[0]["function"]["parameters"]["required"] = []
    assert "another signature" in validate_module(module.source, target_tools=other).reasons[0]
    assert "has no tool 'cancel_order'" in validate_module(module.source, target_tools=module.tools[:1]).reasons[0]


def test_playing_by_hand(module):
    lines = iter(["get_order {", '{"order": 1}', "?"])
    written = []
    task = next(t for t in map(module.scenario, range(50)) if "says" in t.payload["scenario"]["goal"])
    reward = play_by_hand(module.environment(), task, lambda _: next(lines), written.append)
    assert reward == 0.0
    assert any("could not be parsed" in line for line in written)
    lines = iter(["?", "?"])
    assert play_by_hand(module.environment(), task, lambda _: next(lines), written.append) == 1.0
    assert written[-1] == "reward 1.00, success"


def test_by_hand_the_answer_to_the_last_action_is_shown(module):
    environment, written = module.environment(), []
    play_by_hand(environment, module.scenario(0), lambda _: "get_order {", written.append)
    answers = [line for line in written if "could not be parsed" in line]
    assert len(answers) == environment.max_steps


@pytest.mark.parametrize("line", ["get_order {", 'get_order {"order": NaN}', "get_order [1]"])
def test_a_line_that_is_no_call_is_malformed(line: str) -> None:
    assert parse_line(line, [{"function": {"name": "get_order"}}], 1) == Action(malformed=line)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("MAX_STEPS = 6", "MAX_STEPS = 0"), "MAX_STEPS"),
        (("import random", "import random, socket"), "import of socket is forbidden"),
        (("    rng = random.Random(seed)", "    rng = getattr(random, 'Random')(seed)"), "getattr is not available"),
        (("    rng = random.Random(seed)", "    rng = random.Random(seed).__class__(seed)"), "__class__ is not"),
        (("def oracle(scenario, state, log)", "def oracle(scenario, state)"), "exactly 3 positional"),
        (("def reward(", "def rewards("), "reward is missing"),
        (("def transition(state, call):", "def transition(state, call:"), "does not parse"),
        (('"only_look": _only_look, "refuse_always": _refuse_always', ""), "at least three"),
        (('"goal": goal,', '"goal": {},'), "asks for nothing"),
        (('"goal": goal,', '"goal": {"calls": [{"name": "fly", "arguments": {}}]},'), "which TOOLS has not"),
        (('"request": f', '"request": 3 and f'), ""),
        (("    order_id = f", "    raise SystemExit(0)\n    order_id = f"), "SystemExit is not available"),
        (("    rng = random.Random(seed)", "    while True: pass"), "deadline"),
    ],
)
def test_every_fault_of_the_contract_is_named(change, reason, monkeypatch):
    monkeypatch.setattr(module_files, "SandboxedModule", partial(SandboxedModule, limits=QUICK))
    source = EXAMPLE.read_text()
    assert change[0] in source
    limits = Limits(distinct=5, searched=10, episodes=5, attack_seeds=1, replayed=2)
    verdict = validate_module(source.replace(change[0], change[1], 1), limits)
    assert verdict.accepted == (not reason)
    assert reason in "\n".join(verdict.reasons)


EXAMPLES_IN_OPENAI_S_FORM = (
    'EXAMPLES = [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function", '
    '"function": {"name": "cancel_order", "arguments": "{}"}}]}]\n'
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("MAX_STEPS = 6\n", "MAX_STEPS = 6\n" + EXAMPLES_IN_OPENAI_S_FORM), "load: tool_calls in EXAMPLES must be"),
        (
            ("MAX_STEPS = 6\n", 'MAX_STEPS = 6\nEXAMPLES = [{"role": "assistant", "tool_calls": None}]\n'),
            "load: tool_calls in EXAMPLES must be",
        ),
        (
            ('_ORDER = {"order_id": {"type": "string"}}', '_ORDER = {"order_id": "string"}'),
            "load: the parameters of the tool",
        ),
        (("WRONG = {", 'WRONG = [{"a": 1}, {"b": 2}, {"c": 3}]\n_WRONG = {'), "load: WRONG must be"),
        (('"goal": goal,', '"goal": {"calls": [{"name": "get_order", "arguments": None}]},'), "goal.calls is no list"),
        (('"goal": goal,', '"goal": {"calls": [{"name": ["get_order"], "arguments": {}}]},'), "goal.calls is no list"),
        (('"required": ["order_id"]', '"required": None'), "raised TypeError"),
    ],
)
def test_what_a_model_may_write_is_a_refused_version_with_a_reason(module, change, reason):
    assert change[0] in module.source
    verdict = validate_module(module.source.replace(*change), target_tools=module.tools)
    assert not verdict.accepted
    assert reason in "\n".join(verdict.reasons)


def test_a_module_that_is_not_built_whole_leaves_no_worker(monkeypatch):
    made = []

    def broken(self):
        made.append(self._pool._current())
        raise KeyError("name")

    monkeypatch.setattr(SandboxedModule, "_read_constants", broken)
    verdict = validate_module(EXAMPLE.read_text())
    assert verdict.reasons == ("load: raised KeyError: 'name'",)
    assert not made[0].alive


def test_deeply_nested_source_is_refused_not_crashed_on():
    assert static_faults("x = " + "(" * 20_000)
    assert static_faults("x = " + "-" * 50_000 + "1")
    assert "longer than" in static_faults("#" * 70_000)[0]


@pytest.mark.parametrize(
    ("imported", "read"),
    [
        ("import datetime", "datetime.date.today()"),
        ("import datetime as dt", "dt.datetime(2026, 1, 1).now()"),
        ("from datetime import datetime", "datetime.utcnow()"),
        ("from datetime import date as _date", "_date.today()"),
        ("import calendar", "calendar.datetime.date.today()"),
    ],
)
def test_a_module_that_reads_the_clock_is_refused_with_the_line(imported, read):
    source = EXAMPLE.read_text().replace("import random\n", f"import random\n{imported}\n", 1)
    drawn = source.replace("random.Random(seed)", f"random.Random(seed + {read}.toordinal())", 1)
    answered = source.replace('order["status"] != "pending"', f'order["status"] != str({read})', 1)
    assert source != drawn != answered != source
    assert static_faults(source) == []
    for text in (drawn, answered):
        line = next(n for n, words in enumerate(text.splitlines(), 1) if read in words)
        (reason,) = validate_module(text).reasons
        assert reason.startswith(f"static: line {line}: ")
        assert "reads the clock: draw dates from random.Random(seed)" in reason


def test_a_module_may_have_a_day_of_its_own():
    source = EXAMPLE.read_text().replace("import random\n", "import random\nimport datetime\n", 1)
    own = "_DAY = datetime.date(2026, 1, 1)\n\n\nclass _Desk:\n    today = _DAY\n\n\n_NOW = _Desk.today.isoformat()\n"
    assert static_faults(source + own) == []


def test_a_module_that_never_loads_is_a_sandbox_error():
    with pytest.raises(SandboxError, match="ZeroDivisionError"):
        SandboxedModule("1 / 0")


NOTE = """TOOLS = [
    {"type": "function", "function": {"name": "add_note", "description": "Keep a note.", "parameters": {
        "type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}}},
"""
KEPT = """    arguments = call["arguments"]
    if call["name"] == "add_note":
        note = {"id": 1, "text": arguments["text"]}
        return {"state": {**state, "notes": [note]}, "result": note}
"""


def test_a_tool_that_keeps_a_text_and_answers_with_it_is_no_fault_whatever_it_is_told():
    """The red team tells it 100,000 characters, which state and result would hold twice."""
    source = EXAMPLE.read_text().replace("TOOLS = [\n", NOTE, 1)
    source = source.replace('    arguments = call["arguments"]\n', KEPT, 1)
    verdict = validate_module(source, FEW)
    assert verdict.accepted, verdict.reasons
    module = SandboxedModule(source)
    environment = module.environment()
    environment.reset(module.scenario(0))
    answers = [
        environment.step(Action(tool_calls=(ToolCall("add_note", {"text": letter * count}, "c"),))).messages[0].content
        for letter, count in (("A", 9_000), ("B", 10_000))
    ]
    module.close()
    assert "A" * 9_000 in answers[0]
    assert answers[1] == '{"error":"the arguments have 10011 characters, more than 10000"}'


def test_a_target_without_tools_has_modules_without_tools_that_are_judged_like_others():
    path = Path(__file__).parent / "modules_of_bfcl" / "sound_fill_exact_arguments.py"
    limits = Limits(distinct=40, searched=80, episodes=20, attack_seeds=2, replayed=5)
    verdict = validate_module(path.read_text(), limits, target_tools=())
    assert verdict.accepted, verdict.reasons
    assert verdict.figures["need"]["lazy"]["call_every_tool_once"]["win_rate"] == 0.0
    weak = path.read_text().replace("else 0.0", "else 0.6")
    assert "need: the lazy policy" in validate_module(weak, limits, target_tools=()).reasons[0]
    with pytest.raises(SandboxError, match="TRANSFER must be a non-empty str"):
        SandboxedModule(re.sub(r'TRANSFER = "[^"]*"', 'TRANSFER = ""', path.read_text()))
