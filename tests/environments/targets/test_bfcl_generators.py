"""BFCL single-turn generators: the same for a seed, right by BFCL's checker, and nothing of a held-out item in them."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from environments.contract import TargetTask, canonical_json, content_hash
from environments.targets.bfcl.single import generate
from environments.targets.bfcl.single.generate import COMMON, SHORTEST, Pool
from environments.targets.bfcl.single.items import FAMILIES, Item, item_of, live_items, splits
from environments.targets.bfcl.single.numbers import with_other_numbers
from environments.targets.bfcl.single.target import ADAPTER_VERSION, CAPABILITIES, SingleTarget, describe
from environments.targets.reference_check import oracle, play
from errors import TargetError

_missing = [line.missing for line in describe() if line.missing]
pytestmark = pytest.mark.skipif(bool(_missing), reason=f"bfcl-eval is absent: {_missing[:1]}")
SEEDS = 150


@pytest.fixture(scope="module")
def target() -> SingleTarget:
    return SingleTarget()


@pytest.fixture(scope="module")
def scenarios(target: SingleTarget) -> list[TargetTask]:
    return [target.generate(family, seed) for family in FAMILIES for seed in range(SEEDS)]


def items_of(tasks: list[TargetTask]) -> list[Item]:
    return [item_of(task.id, task.payload) for task in tasks]


def test_every_reference_passes_bfcls_checker(target: SingleTarget, scenarios: list[TargetTask]) -> None:
    environment = target.environment()
    assert [task.id for task in scenarios if not play(environment, task, oracle).success] == []
    assert {task.split for task in scenarios} == {"generated"}
    assert all(task.capabilities == CAPABILITIES[task.family] for task in scenarios)


def test_families_have_the_form_of_their_items(scenarios: list[TargetTask]) -> None:
    offered: dict[str, set[int]] = {family: set() for family in FAMILIES}
    wanted: dict[str, set[int]] = {family: set() for family in FAMILIES}
    for item in items_of(scenarios):
        offered[item.category].add(len(item.functions))
        wanted[item.category].add(len(item.reference))
        assert len(item.names) == len(item.functions)
    assert offered["simple_python"] == offered["parallel"] == offered["irrelevance"] == {1}
    assert min(offered["multiple"]) == min(offered["parallel_multiple"]) == 2
    assert (wanted["simple_python"], wanted["multiple"], wanted["irrelevance"]) == ({1}, {1}, {0})
    assert min(wanted["parallel"]) == min(wanted["parallel_multiple"]) == 2


def test_nothing_of_validation_test_and_live_is_in_them(scenarios: list[TargetTask]) -> None:
    """By content: questions whole and as parts, every call of a reference, the names on offer, and each function."""
    held = [*splits()["validation"], *splits()["test"], *live_items()]
    questions = {item.question for item in held}
    calls = {call for item in held for call in item.calls}
    names = {item.names for item in held}
    offered = {canonical_json(function) for item in splits()["diagnosis"] for function in item.functions}
    for item in items_of(scenarios):
        question = item.question
        assert question not in questions
        assert not [asked for asked in questions if len(asked) >= SHORTEST and asked in question]
        assert calls.isdisjoint(item.calls)
        assert item.names not in names
        assert offered.issuperset(canonical_json(function) for function in item.functions)


def test_what_a_scenario_may_not_be() -> None:
    """Collisions are rare, so each rule is shown one."""
    held = made_up("What is the cube of 4711, please?", {"a": [4711]})
    pool = Pool(
        one_call=(),
        by_family={},
        functions=(),
        known=frozenset({("add 5.", frozenset({"f"}))}),
        questions=frozenset({held.question, "hi"}),
        long_questions=(held.question,),
        calls=frozenset(held.calls),
        names=frozenset({frozenset({"g"})}),
    )
    assert pool.allows(made_up("Add 6. Hi there.", {"a": [6]}))
    assert not pool.allows(made_up("Add 5.", {"a": [5]}))
    assert not pool.allows(made_up(" HI", {"a": [6]}))
    assert not pool.allows(made_up("Add 6. Also:  what is the cube of 4711, please?", {"a": [6]}))
    assert not pool.allows(made_up("Cube it for 4711.", {"a": [4711]}))
    other = made_up("Add 6.", {"a": [6]})
    assert not pool.allows(replace(other, functions=({**other.functions[0], "name": "g"},)))


def test_they_are_new_and_many(scenarios: list[TargetTask]) -> None:
    known = {(item.question, item.names) for item in splits()["diagnosis"]}
    made = {family: [] for family in FAMILIES}  # type: dict[str, list[tuple[str, frozenset[str]]]]
    for item in items_of(scenarios):
        assert (item.question, item.names) not in known
        made[item.category].append((item.question, item.names))
    assert all(len(set(found)) >= 0.7 * SEEDS for found in made.values())


def test_equal_seeds_give_equal_scenarios_in_any_process(scenarios: list[TargetTask]) -> None:
    code = (
        "from environments.contract import content_hash; from environments.targets.bfcl.single.target import *\n"
        "target = SingleTarget()\n"
        "tasks = [target.generate(f, s) for f in reversed(FAMILIES) for s in (7, 2)]\n"
        "print(content_hash([[t.id, t.seed, t.payload] for t in tasks]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    by_id = {task.id: task for task in scenarios}
    tasks = [by_id[f"{family}-{seed}"] for family in reversed(FAMILIES) for seed in (7, 2)]
    assert done.stdout.strip() == content_hash([[task.id, task.seed, task.payload] for task in tasks])


def test_another_generator_is_another_version(scenarios: list[TargetTask]) -> None:
    """A scenario's id is its family and seed, and an episode is stored under it and `data_hash`, which covers the
    generators by ADAPTER_VERSION alone: raise it when they give something else, or stored episodes of other questions
    are taken for theirs."""
    made = content_hash([[task.id, task.seed, task.payload] for task in scenarios])
    assert (ADAPTER_VERSION, made) == (1, "85b5b178be4040ef")


def test_a_function_that_must_not_be_called_shares_no_telling_word(scenarios: list[TargetTask]) -> None:
    """What makes declining right: the one function on offer speaks of other things than the question."""
    for item in items_of(scenarios):
        if item.category == "irrelevance":
            (function,) = item.functions
            told = re.findall(r"[a-z]{4,}", f"{function['name']} {function['description']}".lower().replace("_", " "))
            asked = re.findall(r"[a-z]{4,}", item.question.replace("_", " "))
            assert {word[:5] for word in told} & {word[:5] for word in asked} <= COMMON


def test_questions_are_not_joined_where_two_functions_could_be_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hotel_booking` and `hotel_room_pricing` beside one another leave open which of them a question about a hotel
    wants."""

    def one(name: str, told: str, question: str) -> Item:
        item = made_up(question, {"count": [3]})
        return replace(item, functions=({**item.functions[0], "name": name, "description": told},),
                       reference=({name: {"count": [3]}},))  # fmt: skip

    room = one("book_room", "Book a room in a hotel.", "Reserve a suite in a hotel of Lima for 3 nights.")
    price = one("hotel_price", "Price of a hotel.", "How expensive are 3 nights in Lima's hotel?")
    chess, soup = one("chess", "Rate a player.", "Whose 3 wins?"), one("soup", "Cook.", "Boil 3 carrots.")
    items: dict[str, list[Item]] = {"clash": [room, price, replace(price, id="y")], "apart": [room, chess, soup]}
    made = replace(soup, messages=(("user", "Known."),))
    known = frozenset({(made.question, made.names)})
    for kind, of in items.items():
        pool = Pool(tuple(of), {"parallel_multiple": (made,)}, (), known, frozenset(), (), frozenset(), frozenset())
        monkeypatch.setattr(generate, "_pool", lambda pool=pool: pool)
        if kind == "clash":
            with pytest.raises(TargetError, match="none of 2000 scenarios"):
                generate.generated("parallel_multiple", 0)
        else:
            assert len(generate.generated("parallel_multiple", 0).functions) >= 2


# --- other numbers ---------------------------------------------------------------------------------------------------


def made_up(question: str, accepted: dict[str, list[object]], **described: dict[str, object]) -> Item:
    properties = {key: described.get(key, {"type": "integer"}) for key in accepted}
    required = [key for key, values in accepted.items() if "" not in values]
    function = {"name": "f", "description": "", "parameters": {"properties": properties, "required": required}}
    return Item("x", "simple_python", (("user", question),), (function,), ({"f": accepted},))


def test_question_and_reference_get_the_same_numbers() -> None:
    item = made_up("Add 25 to 3.50 in 1990.", {"a": [25], "b": [3.5], "year": [1990]}, b={"type": "float"})
    for seed in range(30):
        other = with_other_numbers(item, random.Random(seed))
        assert other is not None
        found = re.fullmatch(r"Add ([0-9]{2}) to ([0-9]\.[0-9]{2}) in ([0-9]{4})\.", other.messages[0][1])
        assert found, other.messages
        values = other.reference[0]["f"]
        assert values == {"a": [int(found[1])], "b": [float(found[2])], "year": [int(found[3])]}
        assert values["a"] != [25]
        assert type(values["a"][0]) is int
        assert 1950 <= values["year"][0] <= 1990


@pytest.mark.parametrize(
    ("question", "accepted"),
    [
        ("Add 25 to 25.", {"a": [25], "b": [25]}),  # twice in both
        ("Add 25 to it, I said 25.", {"a": [25]}),  # twice in the question
        ("Add 25.", {"a": [25], "b": [25]}),  # twice in the reference
        ("Add 25.", {"a": [25, 26]}),  # another value is accepted, perhaps worked out from it
        ("Add 25 in the end.", {"a": [25, ""]}),  # may be there by default
        ("From 25 on, for 5.", {"a": [25], "end": [30]}),  # 30 is worked out
        ("Add 25 on 2025-05-25.", {"a": [25], "day": ["2025-05-25"]}),  # also in a text
        ("Add 25.", {"a": ["25"]}),
        ("Raise x^25.", {"a": [25]}),
        ("Take 1,025 and 25%5.", {"a": [1025]}),
        ("Take 0 and 1.", {"a": [0], "b": [1]}),
        ("Take 25th.", {"a": [25]}),
    ],
)
def test_other_numbers_are_left_alone(question: str, accepted: dict[str, list[object]]) -> None:
    assert all(with_other_numbers(made_up(question, accepted), random.Random(seed)) is None for seed in range(5))


def test_numbers_of_a_list_of_choices_are_left_alone() -> None:
    item = made_up("Take 25.", {"a": [25]}, a={"type": "integer", "enum": [25, 50]})
    assert with_other_numbers(item, random.Random(0)) is None
