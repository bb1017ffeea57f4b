"""The README's worked example runs as it stands there, and stays within its 40 lines."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from environments.targets.catalogue import load_target
from models.episodes import Episode, Player
from models.policy import Sampling
from models.scripted import NoopPolicy, OraclePolicy

README = Path(__file__).resolve().parent.parent / "README.md"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    (tmp_path / "clock.py").write_text(blocks[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("clock", None)
    return str(blocks[0])


def test_the_worked_example_is_a_target(example: str) -> None:
    assert len(example.splitlines()) <= 42
    target = load_target("clock:target")
    episodes = [Episode(t.id, t) for split in ("diagnosis", "validation", "test") for t in target.tasks(split)]
    for policy, expected in ((OraclePolicy(), True), (NoopPolicy(), False)):
        played = list(Player(target.environment, policy, None, Sampling()).play(episodes))
        assert len(played) == len(episodes)
        assert all(t.score is not None and t.score.success is expected for t in played)


def test_every_command_of_the_readme_exists() -> None:
    from flows.cli.main import app
    from flows.order import STAGES

    known = {c.name or c.callback.__name__.replace("_", "-") for c in app.registered_commands if c.callback}
    known |= {str(group.name) for group in app.registered_groups}
    named = set(re.findall(r"`trace-agent ([a-z-]+)", README.read_text(encoding="utf-8")))
    assert named <= known, named - known
    hidden = {c.name for c in app.registered_commands if c.hidden}
    assert not named & hidden
    assert f"the round up to one stage: {', '.join(STAGES)} |" in README.read_text(encoding="utf-8")
