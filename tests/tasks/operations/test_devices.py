"""What each of several trainings at once has of a machine, and what keeps them from being made at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from errors import ConfigurationError
from settings import load_settings
from tasks.operations.devices import (
    check_at_once,
    check_gpu,
    check_processes,
    parts_of_machine,
    shares,
    training_processes,
    visible_gpus,
)
from tasks.operations.training_memory import check_training
from tasks.round.preflight import check_trainings


@pytest.fixture
def machine(settings_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`machine(gpus=0, cores=8)` is the machine that is seen."""

    def seen(gpus: int = 0, cores: int = 8) -> None:
        monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
        monkeypatch.setattr("torch.get_num_threads", lambda: cores)
        monkeypatch.setattr("models.local.base.cores_here", lambda: cores)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen()
    return seen


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["0,1", "2,3"]), ("7, 3,GPU-ab,MIG-cd", ["7,3", "GPU-ab,MIG-cd"]), ("4,5,6,7,99", ["4,5", "6,7"])],
)
def test_gpus_are_dealt_out_by_the_names_that_they_have(
    machine: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]
) -> None:
    """One that CUDA does not find, and all after it, it does not show."""
    machine(gpus=4)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    settings = load_settings(devices={"trainings": 2})
    assert shares(settings) == [{"CUDA_VISIBLE_DEVICES": names} for names in expected]
    assert training_processes(settings) == 2, "one for each GPU of a share"
    assert shares(load_settings()) == [{}], "a training that is alone has everything"
    assert training_processes(load_settings()) == 4


def test_mig_instances_are_counted_by_name_as_a_process_sees_one_alone(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(gpus=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-ab, MIG-cd")
    settings = load_settings(devices={"trainings": 2})
    check_processes(settings)
    assert shares(settings) == [{"CUDA_VISIBLE_DEVICES": "MIG-ab"}, {"CUDA_VISIBLE_DEVICES": "MIG-cd"}]
    check_at_once(2)
    assert parts_of_machine(2) == shares(settings)
    for trainings in (1, 2):
        assert training_processes(load_settings(devices={"trainings": trainings})) == 1, "the first sees one instance"
    with pytest.raises(ConfigurationError, match=r"processes = 2 .* MIG instances: .* at most 2 to use several"):
        check_processes(load_settings(devices={"processes": 2}))
    machine(gpus=0)  # none of them is there
    assert visible_gpus() == []


def test_a_cpu_build_of_torch_is_named_where_no_gpu_is_seen(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(
        ConfigurationError, match=r"sees none, or torch is a CPU build; check the driver, torch's build"
    ):
        check_gpu(load_settings(profile="gpu"))


def test_without_gpus_threads_are_dealt_out(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == []
    assert shares(load_settings(devices={"trainings": 3})) == [{"OMP_NUM_THREADS": "2"}] * 3
    assert shares(load_settings(devices={"trainings": 2, "processes": 2})) == [{"OMP_NUM_THREADS": "2"}] * 2
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)  # OMP_NUM_THREADS=1 on a machine with more cores
    assert shares(load_settings(devices={"trainings": 3})) == [{"OMP_NUM_THREADS": "1"}] * 3


PAID = {"target_user": "litellm:openai/someone", "devices": {"trainings": 2}}
ALONE = {"train": {"carry": False, "demonstrations": 0}}  # else the default profile is refused first
TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"train": {"carry": True}}, r"= 2, and with train\.carry = true, .* set devices\.trainings = 1, or train\.carry"),
    ({"train": {"generalist": 1, "demonstrations": 2}}, r"train\.demonstrations = 2 .* train\.demonstrations = 0"),
    ({"devices": {"trainings": 2, "sleep": True}}, r"devices\.sleep = true .* answer no other; set"),
    ({"selection": {"most": 1}}, r"= 2, and a round trains selection\.most = 1 capabilities at most; lower"),
]


@pytest.mark.parametrize(("given", "words"), TOGETHER)
def test_trainings_that_would_be_in_each_other_s_way_are_refused(
    machine: Any, given: dict[str, Any], words: str
) -> None:
    given = {"devices": {"trainings": 2}} | ALONE | given
    with pytest.raises(ConfigurationError, match=words):
        check_training(load_settings(**given))
    check_trainings(load_settings(**given | {"devices": given["devices"] | {"trainings": 1}}))
    check_trainings(load_settings(**ALONE, devices={"trainings": 2}, analyst={"max_dollars": 1.0}))
    # A simulated user's caps hold over all processes together.
    check_trainings(load_settings(**ALONE, **PAID, analyst={"max_dollars": 1.0, "max_calls": 9}))


@pytest.mark.parametrize(
    ("gpus", "cores", "devices", "words"),
    [
        (4, 8, {"trainings": 3}, r"= 3 cannot share 4 visible GPUs evenly; set it to a divisor of 4"),
        (1, 8, {"trainings": 2}, r"= 2 cannot share 1 visible GPUs evenly"),
        (4, 8, {"trainings": 2, "processes": 4}, r"processes = 4 in each of devices\.trainings = 2 .* 4 are visible"),
        (2, 8, {"processes": 4}, r"processes = 4 in each of devices\.trainings = 1 .* 2 are visible"),
        (0, 2, {"trainings": 3}, r"= 3 of 1 processes each need a core .* use 2; set devices\.trainings"),
        (0, 3, {"trainings": 2, "processes": 2}, r"= 2 of 2 processes each need a core .* use 3"),
    ],
)
def test_more_processes_than_places_are_refused(
    machine: Any, gpus: int, cores: int, devices: dict[str, int], words: str
) -> None:
    machine(gpus, cores)
    with pytest.raises(ConfigurationError, match=words):
        check_processes(load_settings(devices=devices))


@pytest.mark.parametrize(
    ("gpus", "cores", "devices"),
    [(4, 1, {"trainings": 2}), (4, 1, {"trainings": 2, "processes": 1}), (0, 2, {"trainings": 2}), (0, 1, {})],
)
def test_what_has_a_place_is_not(machine: Any, gpus: int, cores: int, devices: dict[str, int]) -> None:
    machine(gpus, cores)
    check_processes(load_settings(devices=devices))
