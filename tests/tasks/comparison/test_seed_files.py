"""Seeds' files: whole or not at all, read back as they were, comparable or refused; seeds that were used."""

from __future__ import annotations

import getpass
import json
import platform
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from errors import ConfigurationError
from flows.compare_methods import command_of
from settings import _BEFORE, PROFILES, load_settings
from tasks.comparison.results import (
    changed_settings,
    check_same,
    machine,
    path_of,
    read_result,
    read_results,
    settings_hash,
    write_result,
)
from tasks.comparison.seeds import check_seed, fresh_seeds, used_seeds
from tests.tasks.comparison.seed_files import figures, nested, outcomes, seed_result

ROOT = Path(__file__).parents[3]


def test_a_file_is_read_back_as_it_was(tmp_path: Path) -> None:
    result = seed_result(
        7, {"base": figures(6, lost=2), "trace": figures(12, capabilities=nested(6, 12), notes=("a",))}
    )
    path = path_of(tmp_path / "new", "tau2:retail", 7)
    assert path.name == "tau2-retail-seed-7.json"
    write_result(path, result)
    assert read_result(path) == result
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing half-written is left"
    assert result.with_method("noop", figures(0)).methods.keys() == {"base", "trace", "noop"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not a result of compare-methods"),
        ("{}", "target.*Field required"),
        ('{"format": 2}', "is not a result"),
        (None, "No such file"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "shop-seed-1.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        read_result(path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shop-seed-1.json"
    path.write_text(json.dumps(seed_result(1, {}).model_dump(mode="json") | {"format": 2}))
    with pytest.raises(ConfigurationError, match="has format 2, this version reads 1"):
        read_result(path)


def test_a_file_with_other_outcomes_than_its_tasks_is_refused(tmp_path: Path) -> None:
    made = seed_result(7, {}, shift={"s0": "other"})
    path = path_of(tmp_path, "shop", 7)
    for wrong, said in (
        (figures(3, outcomes={"t00": [1.0]}), "base has outcomes of 1 tasks, the file has 24"),
        (figures(3, outcomes=outcomes(3) | {"t00": [7.0, 1.0]}), r"base has the outcome 7\.0; one is 0, 1 or null"),
        (figures(3), "base has outcomes of 0 tasks, the file has 1"),
    ):
        write_result(path, made.with_method("base", wrong))
        with pytest.raises(ConfigurationError, match=said):
            read_result(path)
    write_result(path, made.with_method("base", figures(3, lost=4, shift={"s0": [None, 1.0]})))
    assert read_result(path).methods["base"].shift == {"s0": [None, 1.0]}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"data_hash": "d2"}, "another data hash: d1 and d2"),
        ({"budget": 501}, "another budget: 500 and 501"),
        ({"settings": "s2"}, "another settings"),
        ({"base": "larger"}, "another base model"),
        ({"revision": "r2"}, "another version of the base model: r1 and r2"),
        ({"families": {"t00": "cancel"}}, "another list of test tasks; they"),
    ],
)
def test_files_that_cannot_stand_in_one_table_are_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    results = [seed_result(7, {}), seed_result(8, {}, **changed)]
    with pytest.raises(ConfigurationError, match=said):
        check_same(results)
    for result in results:
        write_result(path_of(tmp_path, "shop", result.seed), result)
    with pytest.raises(ConfigurationError, match=said):
        read_results(tmp_path, "shop")
    assert read_results(tmp_path, "bfcl") == []


def test_a_file_of_before_says_nothing_of_the_base_models_version() -> None:
    for results in ([seed_result(7, {}, revision=""), seed_result(8, {})], [seed_result(7, {}), seed_result(8, {})]):
        check_same(results)


@pytest.mark.parametrize("known", [("", "a", "b"), ("a", "", "b"), ("a", "b", "")])
def test_a_file_of_before_hides_no_difference_of_the_others(known: tuple[str, str, str], tmp_path: Path) -> None:
    """Two versions of the base model would stand in one table, because a third file does not say which it has."""
    results = [seed_result(n, {"base": figures(1)}, revision=version) for n, version in enumerate(known)]
    with pytest.raises(ConfigurationError, match="another version of the base model: a and b"):
        check_same(results)
    for name, part in zip(("shop-seed-0.json", "shop-seed-0-more.json", "shop-seed-1.json"), results, strict=True):
        write_result(tmp_path / name, part.model_copy(update={"seed": int("1." in name)}))
    with pytest.raises(ConfigurationError, match="another version of the base model"):
        read_results(tmp_path, "shop")


def test_prompts_that_other_models_wrote_are_not_one_method(tmp_path: Path) -> None:
    """With the analyst `checks` the settings have one hash, whatever model GEPA asks."""
    ways = [{"model": "openai/large", "temperature": 0.8}, {"model": "openai/small", "temperature": 0.8}, None]
    one, two, before = (seed_result(n, {"gepa": figures(3, reflection=way)}) for n, way in enumerate(ways))
    check_same([one, before, one])
    with pytest.raises(ConfigurationError, match=r"gepa of seed 0 and gepa of seed 1 .*openai/large.*openai/small"):
        check_same([before, one, two])
    write_result(path_of(tmp_path, "shop", 0), one)
    older = json.loads(path_of(tmp_path, "shop", 0).read_text())
    del older["methods"]["gepa"]["reflection"]
    path_of(tmp_path, "shop", 0).write_text(json.dumps(older))
    assert read_results(tmp_path, "shop")[0].methods["gepa"].reflection is None


def test_the_command_of_gepa_names_the_model_that_reflects(settings_folder: Path) -> None:
    played = load_settings(profile="laptop", analyst={"model": "openai/large", "temperature": 0.3})
    set_there = "TRACE_ANALYST__MODEL=openai/large TRACE_ANALYST__TEMPERATURE=0.3 "
    assert command_of(played, 3, 900, ["trace+gepa"]).startswith(set_there)
    assert "ANALYST" not in command_of(played, 3, 900, ["base"])


def test_methods_of_a_seed_that_were_run_apart_are_one_result(tmp_path: Path) -> None:
    one, two = (
        seed_result(7, {"base": figures(3)}),
        seed_result(7, {"base": figures(3, seconds=9.0), "trace": figures(5)}),
    )
    write_result(path_of(tmp_path, "shop", 7), one)
    write_result(path_of(tmp_path, "shop", 7).with_name("shop-seed-7-apart.json"), two)
    write_result(path_of(tmp_path, "shop", 8), seed_result(8, {"base": figures(3)}))
    found = read_results(tmp_path, "shop")
    assert [(r.seed, sorted(r.methods)) for r in found] == [(7, ["base", "trace"]), (8, ["base"])]
    other = seed_result(7, {"base": figures(4)})
    write_result(path_of(tmp_path, "shop", 7).with_name("shop-seed-7-again.json"), other)
    with pytest.raises(ConfigurationError, match="other outcomes of base with seed 7"):
        read_results(tmp_path, "shop")


@pytest.mark.parametrize("profile", sorted(p.stem for p in PROFILES.glob("*.toml")))
def test_what_is_switched_off_is_among_the_changed_settings(settings_folder: Path, profile: str) -> None:
    """What older rounds did not have is left out of the settings that they are found by, where it is off."""
    set_there = tomllib.loads((PROFILES / f"{profile}.toml").read_text())
    off = {
        part: {n: before for n, before in fields.items() if set_there.get(part, {}).get(n, before) != before}
        for part, fields in _BEFORE.items()
    }
    changed = changed_settings(load_settings(profile=profile, **off))
    assert changed == {f"{part}.{n}": before for part, fields in off.items() for n, before in fields.items()}


def test_the_command_of_a_seed_sets_what_it_was_played_with(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "TARGET_USER": "litellm:openai/a name",
        "ROUTER": "label",
        "TRAIN__UPPER_LAYERS": "0",
        "TRAIN__FOCUS": "false",
        "TRAIN__GENERALIST": "0",
        "TRAIN__DEMONSTRATIONS": "0",
        "TRAIN__LEARNING_RATE": "2e-4",
        "EVALUATION__ROUTING": "0",
        "POLICY__BACKEND": "vllm",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"TRACE_{name}", value)
    played = load_settings(profile="laptop", budget=900)
    words = shlex.split(command_of(played, 3, 900, ["base", "trace"]))
    variables = dict(word.split("=", 1) for word in words[: words.index("trace-agent")])
    assert variables.keys() == {f"TRACE_{name}" for name in values}
    for name in values:
        monkeypatch.delenv(f"TRACE_{name}")
    assert settings_hash(load_settings(profile="laptop", budget=900)) != settings_hash(played)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert settings_hash(load_settings(profile="laptop", budget=900)) == settings_hash(played)


def test_a_changed_setting_names_no_folder_of_the_machine(settings_folder: Path) -> None:
    analyst = {"kind": "llm", "model": "hosted_vllm//home/me/models/judge", "api_base": "http://10.0.0.1/v1"}
    changed = changed_settings(load_settings(analyst=analyst, target_user="litellm:openai/name"))
    assert changed["analyst.model"] == "hosted_vllm/judge"
    assert changed["target_user"] == "litellm:openai/name"
    assert "10.0.0.1" not in str(changed)


def test_the_machine_is_named_by_no_name_of_its_own() -> None:
    text = json.dumps(machine())
    for private in (platform.node(), str(Path.home()), str(ROOT)):
        assert private not in text
    assert getpass.getuser() not in machine().values()


def test_the_machine_says_what_gpu_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "gpu" not in machine()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Example")
    assert machine()["gpu"] == "NVIDIA Example"


def test_the_seeds_that_were_used_are_refused() -> None:
    path = ROOT / "benchmarks" / "seeds.toml"
    used = used_seeds(path)
    assert set(used) >= {0, 1, 2, 3, 4, 5, 6, 11}
    for seed in used:
        with pytest.raises(ConfigurationError, match=rf"seed {seed} was used for .* \(seeds.toml\)"):
            check_seed(seed, used, path)
    check_seed(7, used, path)
    for none in (-1, 2**31):
        with pytest.raises(ConfigurationError, match=f"seed {none} is not from 0 to 2147483647"):
            check_seed(none, used, path)
    assert fresh_seeds(5, dict.fromkeys((0, 1, 3, 11), "choosing")) == [2, 4, 5, 6, 7]
    assert not set(fresh_seeds(20, used)) & set(used)


@pytest.mark.parametrize(
    "text",
    [
        "[[used]]\nseeds = [1]",
        '[[used]]\nseeds = ["1"]\nfor = "x"',
        "seeds =",
        "used = [1]",
        "used = 5",
        '[[use]]\nseeds = [1]\nfor = "x"',
        "seeds = [1]",
        "",
    ],
)
def test_a_file_of_used_seeds_that_says_less_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "seeds.toml"
    path.write_text(text)
    with pytest.raises(
        ConfigurationError, match=r"needs seeds|cannot be read|not a list of tables|has no tables \[\[used\]\]"
    ):
        used_seeds(path)
    with pytest.raises(ConfigurationError, match="--used-seeds"):
        used_seeds(tmp_path / "none.toml")
    path.write_text("used = []")
    assert used_seeds(path) == {}
