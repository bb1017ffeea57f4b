"""The shop: solvable everywhere, deterministic, splits apart, short to read, and not to be fooled."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from environments.contract import (
    SPLITS,
    Action,
    Environment,
    Generators,
    Message,
    Prompt,
    Score,
    Target,
    TargetTask,
    ToolCall,
    canonical_json,
    content_hash,
)
from environments.targets.shop.families import FAMILIES
from environments.targets.shop.target import ShopTarget, target
from environments.targets.shop.world import ORDINARY, TOOLS, call_tool, new_database
from errors import EnvironmentFault, TargetError
from models.episodes import Episode, Player, play_all
from models.policy import MessagePolicy, Sampling
from models.scripted import NoopPolicy, OraclePolicy, RandomPolicy

SHOP = target()
ALL = [task for split in SPLITS for task in SHOP.tasks(split)]


def rate(policy: MessagePolicy, tasks: list[TargetTask]) -> float:
    """Share of tasks solved."""
    played = play_all(Player(SHOP.environment, policy, None, Sampling()), [Episode(t.id, t, seed=1) for t in tasks])
    scores = [t.score for t in played if t.score]
    assert len(scores) == len(tasks)
    return sum(s.success for s in scores) / len(scores)


def call(name: str, **arguments: Any) -> Action:
    return Action(tool_calls=(ToolCall(name, arguments, "call_0"),))


def drawn(family: str, seed: int = 0) -> tuple[Environment, TargetTask]:
    environment, task = SHOP.environment(), SHOP.generate(family, seed)
    environment.reset(task)
    return environment, task


def solve(environment: Environment, *before: Action) -> Score:
    """Do `before`, then follow the reference solution to its end."""
    for action in before:
        environment.step(action)
    while (action := environment.oracle()) is not None:
        environment.step(action)
    return environment.score()


def test_it_is_a_target_with_generators() -> None:
    assert isinstance(SHOP, Target)
    assert isinstance(SHOP, Generators)
    assert isinstance(SHOP.environment(), Environment)


def test_reference_solution_and_lazy_policies() -> None:
    assert rate(OraclePolicy(), ALL) == 1.0
    assert rate(NoopPolicy(), ALL) <= 0.05
    assert rate(RandomPolicy(), ALL) <= 0.20


def test_sizes_and_families() -> None:
    sizes = {split: len(SHOP.tasks(split)) for split in SPLITS}
    assert sizes["diagnosis"] >= 120
    assert sizes["validation"] >= 60
    assert sizes["test"] >= 120
    assert len(FAMILIES) >= 12
    assert all({t.family for t in SHOP.tasks(split)} == set(FAMILIES) for split in SPLITS)


def test_splits_share_no_scenario_and_no_seed() -> None:
    hashes = {split: {content_hash(t.payload) for t in SHOP.tasks(split)} for split in SPLITS}
    seeds = {split: {t.seed for t in SHOP.tasks(split)} for split in SPLITS}
    fresh = [SHOP.generate(family, seed) for family in FAMILIES for seed in range(20)]
    hashes["fresh"] = {content_hash(t.payload) for t in fresh}
    seeds["fresh"] = {t.seed for t in fresh}
    names = sorted(hashes)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert not hashes[one] & hashes[other]
            assert not seeds[one] & seeds[other]
    assert len({t.id for t in ALL}) == len(ALL)


def test_equal_seeds_and_actions_give_equal_episodes() -> None:
    assert ShopTarget().data_hash == SHOP.data_hash
    for task in ALL[::17]:
        again = SHOP.generate(task.family, 3)
        assert again == SHOP.generate(task.family, 3)
        runs = []
        for _ in range(2):
            environment, policy, rng = SHOP.environment(), RandomPolicy(), random.Random(5)
            observation = environment.reset(task)
            seen = [m.as_dict() for m in observation.messages]
            for _ in range(environment.max_steps):
                if observation.done:
                    break
                action = policy.act(environment, list(observation.messages), rng.randrange(99))
                observation = environment.step(action)
                seen += [m.as_dict() for m in observation.messages]
            score = environment.score()
            runs.append(canonical_json([seen, score.reward, [[c.name, c.passed] for c in score.checks]]))
        assert runs[0] == runs[1]


def test_an_episode_leaves_its_task_as_it_was() -> None:
    task = next(t for t in ALL if t.family == "cancel_pending")
    before = canonical_json(task.payload)
    environment = SHOP.environment()
    environment.reset(task)
    assert solve(environment).success
    assert canonical_json(task.payload) == before


@pytest.mark.model
def test_instructions_and_examples_are_short(embedded_model: Any) -> None:
    _, renderer = embedded_model
    environment = SHOP.environment()
    first = environment.reset(ALL[0])
    talk = renderer.start(Prompt.of(environment), first.messages)
    assert talk.shared <= 800


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_write_that_nobody_asked_for_is_caught(family: str) -> None:
    environment, task = drawn(family)
    database = task.payload["database"]
    wanted = [s for s in task.payload["reference"] if s.get("call") == "coupon"]
    used = {str(s["arguments"]["order"]) for s in wanted}
    number = next(n for n in sorted(database["orders"]) if n not in used)
    code = next(c for c in database["coupons"] if c not in {s["arguments"]["code"] for s in wanted})
    score = solve(environment, call("coupon", order=int(number), code=code))
    assert not score.success
    assert score.reward == 0.0
    assert {c.name for c in score.checks if not c.passed} >= {"nothing_else_written"}


@pytest.mark.parametrize("family", ["order_status", "item_price", "payment_method", "cancel_too_late", "move_too_late"])
def test_a_fact_has_to_be_learnt_before_it_is_told(family: str) -> None:
    environment, task = drawn(family)
    fact = task.payload["facts"][0]["text"]
    environment.step(Action(content=f"It is {fact}."))
    score = environment.score()
    assert not score.success
    assert not next(c for c in score.checks if c.name == f"told:{fact}").passed
    assert solve(drawn(family)[0]).success


def test_naming_every_status_tells_none() -> None:
    environment, task = drawn("order_status")
    environment.step(call("find", **task.payload["reference"][0]["arguments"]))
    environment.step(Action(content="It is pending, shipped, delivered or cancelled."))
    assert not environment.score().success


def test_the_missing_number_has_to_be_asked_for() -> None:
    environment, task = drawn("cancel_without_number")
    order = next(s for s in task.payload["reference"] if "call" in s)["arguments"]["order"]
    observation = environment.step(Action(content="Of course."))
    assert observation.done
    assert not environment.score().success
    guessed, _ = drawn("cancel_without_number")
    guessed.step(call("cancel", order=order))
    guessed.step(Action(content="Done."))
    asked = next(c for c in guessed.score().checks if c.name == "asked")
    assert not asked.passed
    assert not guessed.score().success


def test_an_attempt_serves_where_the_answer_is_no() -> None:
    """Trying to cancel and reporting the refusal is as good as looking first."""
    environment, task = drawn("cancel_too_late")
    order = task.payload["reference"][0]["arguments"]["order"]
    (result,) = environment.step(call("cancel", order=order)).messages
    assert result.content.startswith("error: order is ")
    environment.step(Action(content=f"Sorry, it is {result.content.split()[-1]}."))
    assert environment.score().success


def test_customers_hang_up_on_repetition_and_on_errors() -> None:
    environment, _ = drawn("cancel_pending")
    environment.step(call("find", order=1))
    assert environment.step(call("find", order=1)).done
    environment, _ = drawn("cancel_pending")
    assert not environment.step(Action(malformed="cancel(")).done
    assert not environment.step(call("nothing")).done
    assert environment.step(call("find", order=2)).done
    assert not environment.score().success
    assert environment.step(Action(content="Hello?")).done  # nothing more happens


def _with_texts(action: Action) -> Action:
    """The action with the number of an order as text, as JSON tool calls often have it."""
    calls = [
        ToolCall(c.name, {k: str(v) if k == "order" else v for k, v in c.arguments.items()}, c.id)
        for c in action.tool_calls
    ]
    return Action(action.content, tuple(calls))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_order_named_by_text_is_the_same_call(family: str) -> None:
    environment, _ = drawn(family)
    while (action := environment.oracle()) is not None:
        environment.step(_with_texts(action))
    assert environment.score() == solve(drawn(family)[0])
    assert environment.score().success


def test_a_call_repeated_by_text_is_a_repetition() -> None:
    environment, task = drawn("cancel_pending")
    order = task.payload["reference"][0]["arguments"]["order"]
    environment.step(call("find", order=order))
    assert environment.step(call("find", order=str(order))).done


DATABASE = new_database(random.Random(1))
NUMBER, ORDER = next(iter(DATABASE["orders"].items()))


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("nothing", {}, "no tool nothing"),
        ("find", {}, "needs order"),
        ("find", {"order": 1, "more": 2}, "needs order"),
        ("person", {"why": "x"}, "needs nothing"),
        ("find", {"order": [1]}, "numbers or texts"),
        ("find", {"order": None}, "numbers or texts"),
        ("find", {"order": 1}, "no order 1"),
        ("price", {"item": "yacht"}, "no item yacht"),
        ("account", {"email": "x@y"}, "no customer"),
        ("coupon", {"order": NUMBER, "code": "FREE"}, "no coupon FREE"),
        ("refund", {"order": NUMBER, "amount": 0}, "not a positive number"),
        ("refund", {"order": NUMBER, "amount": -5}, "not a positive number"),
        ("refund", {"order": NUMBER, "amount": "all"}, "not a positive number"),
        ("refund", {"order": NUMBER, "amount": float("nan")}, "not a positive number"),
        ("refund", {"order": NUMBER, "amount": float("inf")}, "not a positive number"),
        ("refund", {"order": NUMBER, "amount": True}, "not a positive number"),
        ("refund", {"order": NUMBER, "amount": ORDER["paid"] + 1}, "paid only"),
    ],
)
def test_tools_answer_mistakes_and_change_nothing(name: str, arguments: Mapping[str, Any], words: str) -> None:
    before = canonical_json(DATABASE)
    line, worked = call_tool(DATABASE, name, arguments)
    assert line.startswith("error: ")
    assert words in line
    assert not worked
    assert canonical_json(DATABASE) == before


@pytest.mark.parametrize(
    ("name", "status", "more"),
    [
        ("cancel", "shipped", {}),
        ("cancel", "cancelled", {}),
        ("move", "delivered", {"address": "1 Elm Street"}),
        ("swap", "pending", {"option": "red"}),
    ],
)
def test_tools_insist_on_the_policy(name: str, status: str, more: dict[str, Any]) -> None:
    database = new_database(random.Random(2))
    number = next(iter(database["orders"]))
    database["orders"][number]["status"] = status
    assert call_tool(database, name, {"order": number, **more}) == (f"error: order is {status}", False)


def test_coupons_are_used_once_and_refunds_add_up() -> None:
    database = new_database(random.Random(3))
    (one, order), (two, _) = list(database["orders"].items())[:2]
    first, second = database["coupons"]
    assert call_tool(database, "coupon", {"order": one, "code": first}) == ("ok", True)
    assert call_tool(database, "coupon", {"order": two, "code": first})[0] == f"error: coupon {first} is used"
    assert call_tool(database, "coupon", {"order": one, "code": second})[0] == "error: order has a coupon"
    assert call_tool(database, "refund", {"order": one, "amount": order["paid"] - 1}) == ("ok", True)
    assert call_tool(database, "refund", {"order": one, "amount": 2}) == ("error: paid only 1", False)


def test_every_tool_has_a_schema_and_every_item_a_choice() -> None:
    assert [t["function"]["name"] for t in SHOP.environment().tools] == list(TOOLS)
    assert all(len(item["options"]) > 1 for item in ORDINARY.items.values())


def test_what_cannot_be_played_is_refused() -> None:
    with pytest.raises(TargetError, match="'train'"):
        SHOP.tasks("train")
    with pytest.raises(TargetError, match="'nothing'"):
        SHOP.generate("nothing", 0)
    with pytest.raises(TargetError, match="-1"):
        SHOP.generate("item_price", -1)
    with pytest.raises(TargetError, match="'database'"):
        SHOP.environment().reset(TargetTask("x", "test", "x", 0, {}))
    with pytest.raises(EnvironmentFault, match="before reset"):
        SHOP.environment().step(Action(content="x"))
    broken = dict(SHOP.generate("cancel_pending", 0).payload)
    broken["reference"] = [{"call": "cancel", "arguments": {"order": 1}}]
    with pytest.raises(EnvironmentFault, match="reference call"):
        SHOP.environment().reset(TargetTask("x", "test", "x", 0, broken))


def test_messages_are_plain_text() -> None:
    for task in ALL[::5]:
        for message in SHOP.environment().reset(task).messages:
            assert isinstance(message, Message)
            assert message.content == message.content.strip() != ""
