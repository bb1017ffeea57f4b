"""A whole round in which a language model names what is lacking and writes the training environment as code.

The scripted server stands in for that model: real HTTP, real LiteLLM, every kind of trouble, and modules of the tests.
Rollouts, training and everything else are real, on the embedded model.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from db.rows import PROCESS
from tests.db.homes.prefect_homes import prefect_home
from tests.models.providers.scripted_analyst import ScriptedAnalyst, failed, good, refused, slow, truncated

ROOT = Path(__file__).parents[2]
MODULE = (Path(__file__).parent / "targets" / "module_move_order.py").read_text(encoding="utf-8")
ESCAPING = MODULE.replace("import random", "import os\nimport random", 1)
CAPABILITY, UNFIT = "move_order_exactly", "read_minds_of_customers"
# A machine that is busy otherwise needs several times the minute and a half of an idle one.
LIMIT_SECONDS = 1500
RUNS, BATCH = 3, 4
pytestmark = pytest.mark.integration


class Model:
    """What the scripted model answers: right in the end, after trouble of every kind."""

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()  # usable answers to discovery and labelling, by request
        self.troubled: set[str] = set()  # requests that met trouble: the same one, corrected or repeated, is answered
        self.modules = 0
        self.refuses = ""
        self.stored_at_kill = 0

    def __call__(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps(request["messages"])
        task = request["messages"][0]["content"]
        if task.startswith("This is a test"):
            return good({"ready": True})
        if task.startswith("You write training environments"):
            return self._module()
        if task.startswith("Label every pair"):
            self.refuses = self.refuses or body
            if body == self.refuses:
                return refused()
        trouble = [good("not json"), truncated(), failed(429), failed(500), slow(self._answer(task, request), 0.5)]
        step = good(self._answer(task, request))
        asked = request["messages"][1]["content"]
        if number % 5 == 3 and asked not in self.troubled:
            self.troubled.add(asked)
            step = trouble[number // 5 % 5]
        if step not in trouble[:4] and not task.startswith("These failed"):
            self.answered[body] += 1
        return step | {"seconds": max(0.15, step.get("seconds", 0))}

    def _module(self) -> dict[str, Any]:
        self.modules += 1
        steps = {1: failed(500), 2: good({"module": ESCAPING}), 3: refused(), 4: good("no module at all")}
        return steps.get(self.modules, good({"module": MODULE}))

    def _answer(self, task: str, request: dict[str, Any]) -> dict[str, Any]:
        content = request["messages"][1]["content"]
        if task.startswith("Name at most"):
            found = {m: re.findall(rf"### (T\d+) \({m}", content) for m in ("FAILED", "PASSED")}
            definition = "The customer names an order and a town. Both stand in the call exactly as they were said."
            return {
                "capabilities": [
                    {
                        "name": name,
                        "definition": definition,
                        "failed_examples": found["FAILED"][:2],
                        "passed_examples": found["PASSED"][:1],
                    }
                    for name in (CAPABILITY, UNFIT)
                ]
            }
        if task.startswith("Label every pair"):
            rows = []
            for alias, text in re.findall(r"### (T\d+)\n(.*?)(?=\n\n###|\Z)", content, re.S):
                for name in (CAPABILITY, UNFIT):
                    rows.append({"trajectory": alias, "capability": name, "label": moved(text)})
            return {"labels": rows}
        assert task.startswith("These failed trajectories")
        fit = f"## Capability {CAPABILITY}" in content
        cause = "agent" if fit else "ambiguous_task"
        return {"cause": cause, "reason": "It can be practised." if fit else "Nobody says it."}


def moved(text: str) -> str:
    """The label of a trajectory: NA without a wish to move, else whether the call has what the customer said."""
    wish = re.search(r"ove order (\d+) to (\w+)", text)
    if wish is None:
        return "NA"
    call = f'agent calls move {{"order": {wish[1]}, "address": "{wish[2]}"}}'
    return "PRESENT" if call in text and "result: ok" in text else "LACKING"


def environment(folder: Path, api_base: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TRACE_") or k == "TRACE_CACHE"}
    given = {
        "ANALYST__KIND": "llm",
        "ANALYST__MODEL": "hosted_vllm/scripted",
        "ANALYST__API_BASE": api_base,
        "ANALYST__API_KEY_VARIABLE": "SCRIPTED_KEY",
        "ANALYST__BATCH": BATCH,
        "ANALYST__BACKOFF_SECONDS": 0.02,
        "ANALYST__PROMPT_PRICE": 1.0,
        "ANALYST__SAMPLED_PRICE": 2.0,
        "ANALYST__MAX_DOLLARS": 5.0,
        "SYNTHESIZER__KIND": "llm",
        "SELECTION__RUNS": RUNS,
        "SELECTION__REQUIRED": 2,
        # The band has tests of its own; this round is about what comes before and after it.
        "CALIBRATION__LOW": 0.0,
        "CALIBRATION__HIGH": 1.0,
        "CALIBRATION__SPREAD": 0.0,
        "CALIBRATION__UNIFORM": 1.0,
        "CALIBRATION__INFORMATIVE": 0.0,
        "TRAIN__GROUPS": 3,
        "TRAIN__STEPS": 3,  # the fewest with a first third, after which the adapter is tried on the target
        "TRAIN__COLLECTIONS": 3,
        # Steps are cheaper than with the 15 of the profile, and this is no test of what they teach.
        "TRAIN__UPPER_LAYERS": 4,
        "ROLLOUT__TRIALS": 2,
    }
    return (
        clean
        | {f"TRACE_{name}": str(value) for name, value in given.items()}
        | {"PYTHONPATH": str(ROOT), "PREFECT_HOME": prefect_home(folder), "SCRIPTED_KEY": "a-key-of-the-tests"}
    )


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "flows.cli.main", *arguments, "--home", str(folder / "home")]


IMPROVE = ("improve", "--profile", "smoke", "--target", "tests.integration.targets.small_shop:target")


def run(folder: Path, api_base: str, *arguments: str, home: bool = True) -> subprocess.CompletedProcess[str]:
    line = command(folder, *arguments)
    return subprocess.run(
        line if home else line[:-2],
        cwd=folder,
        env=environment(folder, api_base),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        input="?\n\n",
    )


def rows(folder: Path, query: str) -> list[Any]:
    """Rows of a query; none while the store is not there yet."""
    path = folder / "home" / "trace.db"
    if not path.is_file():
        return []
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10) as connection:
        try:
            return connection.execute(query).fetchall()
        except sqlite3.OperationalError:
            return []


def kill_while_labelling(folder: Path, api_base: str, replies: int) -> None:
    """Start the round and kill it with SIGKILL once it has stored so many replies."""
    log = folder / "killed.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command(folder, *IMPROVE),
            cwd=folder,
            env=environment(folder, api_base),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            until = time.monotonic() + LIMIT_SECONDS
            while (rows(folder, "SELECT COUNT(*) FROM replies") or [(0,)])[0][0] < replies:
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < until, log.read_text()[-3000:]
                time.sleep(0.05)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Model, str]]:
    """(folder, model, address) of a round that was killed in the middle of labelling and then run to its end."""
    folder, model = tmp_path_factory.mktemp("written"), Model()
    with ScriptedAnalyst(model) as server:
        kill_while_labelling(folder, server.api_base, 8)
        model.stored_at_kill = rows(folder, "SELECT COUNT(*) FROM replies")[0][0]
        assert rows(folder, "SELECT COUNT(*) FROM labels") == [(0,)]
        done = run(folder, server.api_base, *IMPROVE)
        assert done.returncode == 0, done.stderr[-4000:]
        yield folder, model, server.api_base


def test_the_round_ends_and_trains_what_the_model_named(played: tuple[Path, Model, str]) -> None:
    folder, _, _ = played
    assert rows(folder, "SELECT number, state FROM rounds") == [(1, "done")]
    owed = f"stages WHERE state NOT IN ('done', 'skipped') AND name NOT LIKE '{PROCESS}%'"
    assert rows(folder, f"SELECT COUNT(*) FROM {owed}") == [(0,)]
    assert rows(folder, "SELECT DISTINCT analyst FROM capabilities") == [("llm",)]
    assert dict(rows(folder, "SELECT name, trainable FROM capabilities")) == {CAPABILITY: 1, UNFIT: 0}
    ((state, environment_id),) = rows(folder, "SELECT state, environment_id FROM adapters")
    assert state in ("rejected", "champion")
    ((kind, state, level),) = rows(
        folder, f"SELECT kind, state, sandbox_level FROM synthesized_environments WHERE id = '{environment_id}'"
    )
    assert (kind, state) == ("llm", "accepted")
    assert level in ("bubblewrap", "container")
    trained = rows(folder, "SELECT DISTINCT family FROM trajectories WHERE purpose = 'training'")
    assert (CAPABILITY,) in trained
    tried = rows(folder, "SELECT COUNT(*), COUNT(DISTINCT policy_id) FROM trajectories WHERE purpose = 'transfer'")
    steps = rows(folder, "SELECT json_extract(metrics, '$.level') FROM training_steps")
    assert tried == [(24, 1)]
    assert steps
    assert {level for (level,) in steps} <= {0.0, 1.0}


def test_what_was_answered_before_the_kill_is_not_paid_twice(played: tuple[Path, Model, str]) -> None:
    _, model, _ = played
    assert model.stored_at_kill >= 8
    # Discovery, and all of labelling: of the request that was refused, its trajectories singly.
    assert len(model.answered) == 1 + RUNS * 32 // BATCH - 1 + BATCH
    # Only what was under way when the kill came is asked again: as many calls as may run at once.
    assert sum(model.answered.values()) - len(model.answered) <= 4


def test_labels_lead_to_runs_requests_and_trajectories(played: tuple[Path, Model, str]) -> None:
    folder, _, _ = played
    per_run = dict(rows(folder, "SELECT run, COUNT(*) FROM labels GROUP BY run"))
    assert len(per_run) == RUNS  # also the one with a refused request
    assert set(per_run.values()) == {2 * 32}
    lost = "SELECT COUNT(*) FROM labels l LEFT JOIN replies r ON l.request_hash = r.request_hash WHERE r.reply IS NULL"
    assert rows(folder, lost) == [(0,)]
    ((result,),) = rows(folder, "SELECT result FROM stages WHERE name = 'contrast'")
    stored = json.loads(result)
    assert (stored["refused"], stored["filtered"]) == ({}, [])
    one = "SELECT 1 FROM labels GROUP BY request_hash HAVING COUNT(DISTINCT trajectory_id) = 1"
    assert rows(folder, f"SELECT COUNT(*) FROM ({one})") == [(BATCH,)]
    assert stored["kappa"] == 1.0


def test_every_version_is_stored_with_its_verdict(played: tuple[Path, Model, str]) -> None:
    folder, _, _ = played
    found = rows(folder, "SELECT version, state, code_hash, verdicts FROM synthesized_environments ORDER BY version")
    assert [(version, state) for version, state, _, _ in found][:2] == [(1, "rejected"), (2, "rejected")]
    assert found[-1][1] == "accepted"
    assert len(found) <= 5
    first, last = json.loads(found[0][3]), json.loads(found[-1][3])
    assert "import of os is forbidden" in first["validation"]["reasons"][0]
    assert len(found[-1][2]) == 64
    assert last["validation"]["figures"]["red_team"]["successes"] == {}
    assert last["calibration"]["accepted"]
    assert 0 <= last["calibration"]["figures"]["success_rate"] <= 1


def test_report_and_spend_show_what_the_model_did(played: tuple[Path, Model, str]) -> None:
    folder, _, _ = played
    (page,) = (folder / "home").glob("*/report.html")
    figures = json.loads((page.parent / "figures.json").read_text())
    analyst = figures["analyst"]
    assert analyst["model"] == "hosted_vllm/scripted"
    ((calls, dollars),) = rows(folder, "SELECT SUM(calls), SUM(dollars) FROM spend WHERE round_id IS NOT NULL")
    assert analyst["calls"] == calls
    assert analyst["dollars"] == pytest.approx(dollars, abs=1e-6)
    assert dollars > 0
    capabilities = {c["name"]: c for c in figures["capabilities"]}
    assert capabilities[CAPABILITY]["kappa"] == 1.0
    versions = capabilities[CAPABILITY]["versions"]
    assert versions[-1]["accepted"] is True
    assert capabilities[CAPABILITY]["calibration"]["version"] == len(versions) > 1
    assert capabilities[UNFIT]["verdict"] == "not-trainable"
    assert capabilities[CAPABILITY]["transfer"]["episodes"] == 24
    assert analyst["author"] == analyst["judge"] == "hosted_vllm/scripted"
    assert (analyst["environments"], analyst["banked"]) == (1, 0)
    assert analyst["dollars_each"] == pytest.approx(analyst["stages"]["synthesize"])
    html = page.read_text()
    for text in ("not-trainable", "Nobody says it.", "hosted_vllm/scripted", "import of os is forbidden", "kappa"):
        assert text in html
    everything = html + json.dumps(rows(folder, "SELECT config FROM rounds"))
    assert "a-key-of-the-tests" not in everything


def test_the_accepted_environment_is_a_file_to_read_play_and_judge_again(played: tuple[Path, Model, str]) -> None:
    folder, _, api_base = played
    (path,) = (folder / "home").glob(f"*/environments/{CAPABILITY}-*.py")
    assert path.read_text() == MODULE
    judged = run(folder, api_base, "validate", str(path), home=False)
    assert judged.returncode == 0, judged.stderr
    assert judged.stdout.startswith("accepted")
    by_hand = run(folder, api_base, "play", str(path), "--seed", "3", home=False)
    assert by_hand.returncode == 0, by_hand.stderr
    assert "move" in by_hand.stdout
    assert "success" in by_hand.stdout
