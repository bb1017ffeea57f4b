"""The catalogue: names, entry points, dotted paths, unknown names, and describing what is absent."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path

import pytest

from environments.contract import Target, TargetTask
from environments.targets import catalogue
from environments.targets.catalogue import check_target_name, describe_targets, load_target
from environments.targets.third_party.adapter import TargetInfo
from errors import TargetError


class _Own:
    """A target as another package would bring it."""

    name, data_hash, licence = "own", "0" * 16, "MIT"

    def tasks(self, split: str) -> list[object]:
        return []

    def environment(self) -> None:
        return None


@pytest.fixture
def own_package(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("own_package.targets")
    module.target, module.build, module.wrong = _Own(), _Own, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_package", types.ModuleType("own_package"))
    monkeypatch.setitem(sys.modules, "own_package.targets", module)
    return "own_package.targets"


def test_dotted_path_gives_a_target_or_calls_a_function(own_package: str) -> None:
    assert load_target(f"{own_package}:target").name == "own"
    assert load_target(f"{own_package}:build").name == "own"
    with pytest.raises(TargetError, match="int, not a target"):
        load_target(f"{own_package}:wrong")
    with pytest.raises(TargetError, match="absent"):
        load_target(f"{own_package}:absent")
    with pytest.raises(TargetError, match=r"module 'json\.absent' does not import"):
        load_target("json.absent:target")
    with pytest.raises(TargetError, match=r"module 'tasks' is .*/tasks/__init__.py: .* called like it another name"):
        load_target("tasks:target")  # a file of the user's own is hidden by the project's


def test_entry_points_are_targets(own_package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        importlib.metadata.EntryPoint("own", f"{own_package}:build", catalogue.ENTRY_POINTS),
        importlib.metadata.EntryPoint("broken", "no_such_package:x", catalogue.ENTRY_POINTS),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    assert isinstance(load_target("own"), Target)
    with pytest.raises(TargetError, match="broken"):
        load_target("broken")
    lines = {line.name: line for line in describe_targets()}
    assert lines["own"].data_hash == "0" * 16
    assert "broken" in lines["broken"].missing
    # No method `drawn`: a finite target. reasoning-gym draws where it is installed.
    assert {name for name, line in lines.items() if line.draws} - {"reasoning-gym"} == {"shop"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def target(:", "SyntaxError: invalid syntax"),
        ("target = {}['mine']", "KeyError: 'mine'"),
        ("def target(): raise ValueError('my own bug')", "ValueError: my own bug"),
        ("import sys; sys.exit('usage: ...')", "SystemExit: usage"),
        ("import sys; target = type('T', (), {'data_hash': property(lambda self: 1 / 0), 'name': '', 'licence': '',"
         "'tasks': print, 'environment': print})()", "ZeroDivisionError: division by zero"),
    ],
)  # fmt: skip
def test_whatever_the_module_of_another_raises_is_one_error_and_a_line_of_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    (tmp_path / "raising_target.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "raising_target", raising=False)
    with pytest.raises(TargetError, match=f"'raising_target:target' does not load .{said}"):
        load_target("raising_target:target")
    points = [importlib.metadata.EntryPoint("theirs", "raising_target:target", catalogue.ENTRY_POINTS)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    assert f"does not load ({said}" in described()["theirs"].missing


def test_tasks_that_raise_or_repeat_are_a_line_of_the_list(own_package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [importlib.metadata.EntryPoint("own", f"{own_package}:build", catalogue.ENTRY_POINTS)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setattr(_Own, "tasks", lambda self, split: {}["nowhere"])
    assert "tasks('diagnosis') of target 'own' fails: KeyError: 'nowhere'" in described()["own"].missing
    monkeypatch.setattr(_Own, "tasks", lambda self, split: [TargetTask("0", split, "f", 0)])
    assert "task id '0' is in diagnosis and in validation" in described()["own"].missing


def described() -> dict[str, TargetInfo]:
    return {line.name: line for line in describe_targets()}


def test_an_entry_point_with_the_name_of_a_built_in_target_is_left_out_and_told_once(
    own_package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    points = [
        importlib.metadata.EntryPoint(name, f"{own_package}:build", catalogue.ENTRY_POINTS)
        for name in ("shop", "reasoning-gym:mine", "own")
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    with caplog.at_level("WARNING", logger="trace"):
        names = [line.name for line in describe_targets()]
        assert load_target("shop").name == "shop"
        assert load_target("own").name == "own"
    assert (names.count("shop"), names.count("reasoning-gym:mine"), names.count("own")) == (1, 0, 1)
    told = [record.getMessage() for record in caplog.records if "has the name of a built-in target" in record.message]
    assert len(told) == 2
    assert told[0].startswith("the entry point 'shop'")


def test_unknown_name_lists_what_exists_and_what_is_close() -> None:
    with pytest.raises(TargetError, match=r"did you mean tau2:retail.*There are: shop, shop:shift, tau2:airline"):
        load_target("tau2:retial")
    with pytest.raises(
        TargetError, match=r"no module 'nosuch' here.*There are: shop, shop:shift, .*or package\.module"
    ):
        check_target_name("nosuch:target")
    with pytest.raises(TargetError, match=r"no module 'tau3' here\); did you mean tau2:retail"):
        check_target_name("tau3:retail")
    with pytest.raises(TargetError, match=r"reasoning-gym:FAMILY,\.\.\.; to evaluate .*, tau2, bfcl, agentdojo; or"):
        check_target_name("tau")
    check_target_name("json.absent:target")
    check_target_name("reasoning-gym:chain_sum")
    with pytest.raises(TargetError, match="There are"):
        load_target("")


def test_absent_packages_are_described_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    gone = {"tau2", "agentdojo", "bfcl_eval", "tool_sandbox"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in gone else real(name, *rest))
    monkeypatch.delenv("TRACE_TOOLSANDBOX", raising=False)
    lines = {line.name: line for line in describe_targets()}
    wanted = ["tau2:retail", "toolsandbox", "toolsandbox:augmented", "agentdojo:slack"]
    for name in wanted:
        assert lines[name].missing
        assert "make install-" in lines[name].how_to_get
        assert not lines[name].splits
        with pytest.raises(TargetError, match="make install-"):
            load_target(name)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("agentdojo") is None:
        pytest.skip("agentdojo is absent: its version cannot be wrong")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    with pytest.raises(TargetError, match=r"agentdojo 0\.0\.1 is installed.*proven with"):
        load_target("agentdojo:slack")


def test_checkout_without_scenarios_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACE_TOOLSANDBOX", str(tmp_path))
    with pytest.raises(TargetError, match="has no folder tool_sandbox/scenarios"):
        load_target("toolsandbox")
