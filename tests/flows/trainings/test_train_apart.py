"""A training in another process: ended when it takes too long, gone on with once, and its errors are the stage's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from errors import ConfigurationError, LimitReached, ProviderError, StoreError, TraceError, TrainingError, TrainingStuck
from flows import train_apart as apart
from flows.train_apart import train_apart
from models.policy import Request, Sampling
from settings import load_settings
from tasks.operations import jobs
from tasks.operations.devices import check_processes, training_processes
from tasks.round.context import Context
from tasks.round.results import TrainResult
from tasks.round.stage import open_context

RESULT = TrainResult(adapter="a", sha256="0", steps=1, run="r", ending="steps", chosen=1, verdict="")


def context(folder: Path, seconds: float = 60.0, done: Any = None) -> Any:
    settings = load_settings(home=folder, gateway_keys="k" * 24, limits={"training_minutes": seconds / 60})
    return SimpleNamespace(settings=settings, round=SimpleNamespace(id="r"), found=lambda kind, name: done)


def command(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import json, sys, time\nspec = json.load(open(sys.argv[1]))\n{code}")


def test_the_order_reaches_the_process_without_a_key(settings_folder: Path) -> None:
    said = settings_folder / "order.json"
    code = "import os\nspec['mode'] = os.stat(os.path.dirname(sys.argv[1])).st_mode & 0o777\n"
    code += "spec['path'] = sys.argv[1]\n"
    train_apart(context(settings_folder), "refund", command(f"{code}json.dump(spec, open({str(said)!r}, 'w'))"))
    spec = json.loads(said.read_text())
    order = spec["order"]
    assert spec["lead"] == "flows.train_apart:lead"
    assert spec["base"]["name"] == "smollm2-135m"
    assert (spec["mode"], Path(spec["path"]).exists()) == (0o700, False), "it may hold the store's password"
    assert (order["round"], order["capability"]) == ("r", "refund")
    assert order["settings"]["limits"]["training_minutes"] == 1.0
    assert "gateway_keys" not in order["settings"]


@pytest.mark.parametrize(
    ("given", "processes", "expected"),
    [
        ({}, 1, False),
        ({"limits": {"training_minutes": 1}}, 1, True),
        ({"devices": {"processes": 2}}, 2, True),
        ({"devices": {"trainings": 2}}, 1, True),
    ],
)
def test_a_limit_or_a_second_process_or_training_makes_a_training_a_job(
    settings_folder: Path, given: dict[str, Any], processes: int, expected: bool
) -> None:
    settings = load_settings(home=settings_folder, **given)
    assert training_processes(settings) == processes
    assert apart.apart(SimpleNamespace(settings=settings, budget=None)) is expected  # type: ignore[arg-type]
    assert apart.apart(SimpleNamespace(settings=settings, budget=object())) is False  # type: ignore[arg-type]


def test_every_visible_gpu_has_a_process_and_rows_have_to_be_shared_evenly(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    settings = load_settings(home=settings_folder)
    assert training_processes(settings) == 3
    assert apart.command_of(1)[1:] == apart.JOB
    assert apart.command_of(3)[1:6] == ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "3")
    with pytest.raises(ConfigurationError, match=r"= 32 rows cannot be shared by 3 processes; set devices\.processes"):
        check_processes(settings)


def test_the_round_s_process_gives_back_what_sampling_took(settings_folder: Path, tiny_model: Any) -> None:
    """Without loading a base for it."""
    opened = Context(load_settings(home=settings_folder), None, None)  # type: ignore[arg-type]
    opened.rest()
    assert "base" not in vars(opened)
    policy, _ = tiny_model
    opened.__dict__["base"] = SimpleNamespace(policy=policy)
    policy.generate([Request("r", [5, 6, 7], Sampling(0.0, 2))])
    assert policy._cache.store
    opened.rest()
    assert not policy._cache.store


def test_what_is_done_starts_no_process(settings_folder: Path) -> None:
    train_apart(context(settings_folder, done=RESULT), "refund", ("/no/such/program",))


def test_a_training_that_hangs_is_ended_twice_with_all_that_it_started(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.02)
    pids = settings_folder / "pids"
    hang = command(
        "import os, subprocess\nchild = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}} {{child.pid}}\\n')\ntime.sleep(60)"
    )
    with pytest.raises(TrainingStuck, match="'refund' was ended 2 times after limits"):
        train_apart(context(settings_folder, seconds=0.5), "refund", hang)
    lines = pids.read_text().splitlines()
    assert len(lines) == 2
    # A kill is sent, and the kernel takes its moment to carry it out on one that is no child of ours.
    started = [psutil.Process(pid) for pid in map(int, " ".join(lines).split()) if psutil.pid_exists(pid)]
    _, left = psutil.wait_procs([p for p in started if not ended(p)], timeout=10)
    assert [p for p in left if not ended(p)] == []


def ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(("kind", "transient"), [(TrainingError, False), (LimitReached, False), (StoreError, True)])
def test_an_error_of_the_stage_comes_back_as_what_it_is(
    settings_folder: Path, kind: type[TraceError], transient: bool
) -> None:
    said = json.dumps({"error": kind.__name__, "message": "no group", "transient": transient})
    with pytest.raises(kind, match="no group") as raised:
        train_apart(context(settings_folder), "refund", command(f"print({said!r}); print('[1]'); sys.exit(1)"))
    assert raised.value.transient is transient, "by this it is tried again"


@pytest.mark.parametrize("code", ["sys.exit(3)", "print('Traceback'); sys.exit(3)", "print('{}'); sys.exit(3)"])
def test_any_other_death_is_said_with_its_status(settings_folder: Path, code: str) -> None:
    with pytest.raises(RuntimeError, match="'refund' ended with status 3"):
        train_apart(context(settings_folder), "refund", command(code))


class Away(ProviderError):
    """Stands for an error of another file, which only its base names."""


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (None, {}),
        (TrainingError("no group"), {"error": "TrainingError", "message": "no group", "transient": False}),
        (Away("no server", transient=True), {"error": "ProviderError", "message": "no server", "transient": True}),
    ],
)
def test_the_other_process_does_the_stage_of_that_round(
    settings_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    problem: Exception | None,
    told: dict[str, Any],
) -> None:
    opened = open_context(load_settings(profile="smoke", home=settings_folder / "home", seed=5))
    order = {"settings": apart._settings_of(opened), "round": opened.round.id, "capability": "refund"}
    done: list[tuple[Context, str]] = []

    def do(given: Context, capability: str) -> None:
        done.append((given, capability))
        if problem:
            raise problem

    monkeypatch.setattr(apart.train, "do", do)
    monkeypatch.setattr(apart, "end_with_parent", lambda: None)
    assert apart.lead(order) == (1 if problem else 0)
    ((given, capability),) = done
    assert (given.round, given.settings, capability) == (opened.round, opened.settings, "refund")
    assert given.adopted, "it does not end the round's run in MLflow"
    said = capsys.readouterr().out
    assert said == (f"{json.dumps(told)}\n" if problem else "")
