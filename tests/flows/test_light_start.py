"""What a user got wrong is refused before anything heavy is imported, and what is loaded without the garbage collector
leaves it on afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from db import open_store
from settings import load_settings
from tasks.reporting.figures import RoundFigures

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "prefect", "mlflow", "litellm")
IMPORTED = f"""
import atexit, sys
atexit.register(lambda: print("imported", *[name for name in {HEAVY!r} if name in sys.modules]))
"""


def run(folder: Path, code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python code in an empty folder, which ends by printing which of the heavy libraries it imported."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TRACE_")}
    clean |= {"PYTHONPATH": str(ROOT), "PREFECT_HOME": str(folder / "prefect"), **environment}
    command = [sys.executable, "-c", IMPORTED + code, *arguments]
    return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=120)


def test_the_command_line_is_light(tmp_path: Path) -> None:
    done = run(tmp_path, "import flows.cli.main; print('pydantic' in sys.modules)")
    assert done.stdout == "False\nimported\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (("improve", "--target", "nowhere"), {}, "'nowhere' does not exist. There are: shop,"),
        (("improve", "--target", "shopp"), {}, "did you mean shop"),
        (("stage", "select", "--target", "nowhere"), {}, "'nowhere' does not exist. There are: shop,"),
        (("stage", "train", "--target", "traffic"), {}, "train needs tasks that can be played"),
        (("improve", "--base-model", "/no/such/folder"), {}, "'/no/such/folder' cannot be loaded"),
        (("improve", "--home", "file/home"), {}, "cannot be written"),
        (("improve",), {"TRACE_DATABASE": "postgresql+psycopg://127.0.0.1:1/x"}, "error (store)"),
        (("improve",), {"PREFECT_API_URL": "http://127.0.0.1:1/api"}, "; start it ('python -m flows.prefect_server')"),
        (("improve", "--dry-run"), {"TRACE_TRACKING": "http://127.0.0.1:1"}, "; start it (docs/1-running.md), or corr"),
        (("improve", "--target", "nosuch:target"), {}, "no module 'nosuch' here). There are: shop,"),
        (("improve",), {"TRACE_ROLOUT__TASKS": "9"}, "did you mean TRACE_ROLLOUT__TASKS?"),
        (("improve",), {"TRACE_ANALYST__KIND": "llm"}, "no model is configured"),
        (
            ("improve", "--profile", "night"),
            {"TRACE_DEVICES__TRAININGS": "2"},
            "set devices.trainings = 1, or train.carry",
        ),
        (
            ("improve",),
            {"TRACE_POLICY__BACKEND": "vllm", "TRACE_POLICY__API_KEY_ENV": "NO_SUCH_KEY"},
            "'NO_SUCH_KEY', which is not set",
        ),
        (
            ("compare-methods", "--seed", "3", "--budget", "900", "--used-seeds", "used.toml"),
            {},
            "seed 3 was used for x",
        ),
        (("compare-methods", "--seed", "4", "--used-seeds", "used.toml"), {}, "no budget is given"),
        (("compare-methods", "--seeds", "2", "--seed", "4", "--seed", "5"), {}, "--seed 5 are both given"),
        (("compare-methods", "--budget", "900"), {}, "name it with --used-seeds"),
    ],
)
def test_a_refusal_imports_nothing_heavy(
    tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str], said: str
) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "used.toml").write_text('[[used]]\nseeds = [3]\nfor = "x"\n')
    # The files of the embedded model are not the matter here.
    made = tmp_path / "cache" / "smollm2-135m-b179c9523d0e"
    made.mkdir(parents=True)
    (made / "complete").write_text("")
    done = run(
        tmp_path, "from flows.cli.main import main; main()", *arguments, TRACE_CACHE=str(made.parent), **environment
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert said in done.stderr
    assert done.stdout == "imported\n"
    assert not (tmp_path / "prefect").exists()


LOADED = """
import gc
from flows.cli.ready import loading
assert gc.isenabled() and not gc.get_freeze_count()
try:
    with loading():
        print("inside", gc.isenabled())
        held = [[] for _ in range(10_000)]
        raise KeyError
except KeyError:
    print("after", gc.isenabled(), gc.get_freeze_count() > 10_000)
"""


def test_the_collector_waits_and_comes_back() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "inside False\nafter True True\n"


def test_where_a_report_is_takes_no_drawing_of_it(tmp_path: Path) -> None:
    """Of a round whose page is there, the answer comes without the libraries that make pages."""
    settings = load_settings(home=tmp_path / "runs")
    with open_store(settings.database_url) as store:
        made = store.start_round("shop", "data", 0, "smoke", {})
    page = settings.folder / made.id / "report.html"
    page.parent.mkdir(parents=True)
    page.write_text("<p>report</p>")
    figures = RoundFigures(round=made.id, target="shop", data_hash="data", seed=0)
    page.with_name("figures.json").write_text(figures.model_dump_json())
    heavy = "('pandas', 'jinja2', 'numpy')"
    code = f"import atexit, sys; atexit.register(lambda: print(*[name in sys.modules for name in {heavy}]))"
    done = run(tmp_path, f"{code}\nfrom flows.cli.main import main; main()", "report", "--home", str(settings.folder))
    assert done.stdout.split() == [str(page), "False", "False", "False", "imported"], done.stderr
