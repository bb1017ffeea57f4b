"""The pages of a round's episodes: plain files that say everything, ask nobody, and stay light."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from db import GENERALIST, CapabilityRow, CheckRow, SelectionRow, Store, open_store, row_id
from errors import StoreError
from settings import Settings, load_settings
from tasks.episodes.pages import pages_of, render_page, slug, write_pages, write_report
from tasks.episodes.secrets import HIDDEN, hiding, secrets_of
from tasks.episodes.shown import MOST_CHECKS, shown_episode
from tasks.episodes.traces import trace_of
from tasks.report import prefect_summary
from tasks.reporting.figures import CapabilityFigures
from tasks.reporting.lookup import EPISODES
from tests.tasks.episodes.practised_rounds import ADAPTER, CAPABILITY, Practised

BROWSER = next((path for n in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(n))), None)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite:///{tmp_path}/trace.db") as opened:
        yield opened


@pytest.fixture
def settings(settings_folder: Path) -> Settings:
    return load_settings(home=settings_folder / "home")


class Links(HTMLParser):
    """Addresses of links, and all tags."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [value for name, value in attrs if name in ("href", "src") and value]


@pytest.mark.parametrize(
    "address", ["postgresql+psycopg://ml:Zk9/secret-777@db:5432/mlflow", "postgresql://db/m?password=Zk9/secret-777"]
)
def test_a_password_of_the_registrys_database_is_a_secret_whatever_stands_in_it(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("TRACE_TRACKING", address)
    assert "Zk9/secret-777" in secrets_of(load_settings(home=settings_folder))


def test_every_link_leads_to_a_file_and_no_page_asks_anybody(store: Store, settings: Settings) -> None:
    made = Practised(store)
    html = write_report(settings, store, made.figures())
    folder = settings.folder / made.round.id
    assert html == (folder / "report.html").read_text(encoding="utf-8")
    pages = sorted(folder.rglob("*.html"))
    assert [p.name for p in pages] == [
        "diagnosis.html", "index.html", "test.html", f"train-{CAPABILITY}.html", "report.html",
    ]  # fmt: skip
    reached, waiting = set(), [folder / "report.html"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        links = Links(page)
        assert not links.tags & {"script", "img", "iframe", "object", "form"}, page
        assert "default-src 'none'" in page.read_text(encoding="utf-8")
        for link in links.found:
            assert "//" not in link, f"{page.name} leads outside: {link}"
            target = (page.parent / link.partition("#")[0]).resolve() if not link.startswith("#") else page
            assert target.is_file(), link
            waiting.append(target)
    assert reached == set(pages)


def test_what_an_episode_says_is_text_and_never_markup(store: Store, tmp_path: Path) -> None:
    made = Practised(store)
    made.episode("p", 'a"><script>x-1', 700_021, 0, 1.0, purpose="training", adapter_id="adapter-1")
    index = write_pages(made.stored, made.figures(), tmp_path, str)
    for page in index.parent.iterdir():
        text = page.read_text(encoding="utf-8")
        assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in (index.parent / "test.html").read_text(encoding="utf-8")


def test_the_way_from_failure_to_release_is_told_step_by_step(store: Store, tmp_path: Path) -> None:
    index = write_pages((made := Practised(store)).stored, made.figures(), tmp_path, str).read_text(encoding="utf-8")
    (chain,) = re.findall(r'<ol class="chain">(.*?)</ol>', index, re.DOTALL)
    assert re.findall(r"<b>(\w+)</b>", chain) == ["failure", "label", "environment", "adapter", "verdict", "release"]
    assert 'class="not"' not in chain
    for words in (
        "1 failed episode as evidence",
        "contrast 0.60",
        "environment-1",
        "weights of step 1",
        "fresh seeds: 10.0 % to 90.0 %",
        "alone: better",
        "+37.5 points",
        "release 3",
        "+22.2 points",
    ):
        assert words in chain, words
    assert "set_address" not in index


def test_the_generalists_way_has_no_label_of_its_own(store: Store) -> None:
    made = Practised(store)
    round_id = made.round.id
    identity = row_id(round_id, GENERALIST)
    store.put([CapabilityRow(id=identity, round_id=round_id, name=GENERALIST, analyst="checks")])
    store.put([SelectionRow(round_id=round_id, capability_id=identity, selected=True, rank=1, reason="trained last")])
    last = CapabilityFigures(name=GENERALIST, mean_cov=None, mean_delta=None, runs_passed=0, verdict="unfinished")
    figures = made.figures()
    told = prefect_summary(made.stored, figures.model_copy(update={"capabilities": [*figures.capabilities, last]}))
    assert "| generalist | what all its capabilities are for | – | – | – | – |" in told


def test_prefect_is_told_the_same_way_in_a_table(store: Store) -> None:
    made = Practised(store)
    told = prefect_summary(made.stored, made.figures())
    assert "| capability | failure | label | environment | adapter | verdict | release |" in told
    row = (
        "| refund_payment | 1 failed episode as evidence | lacking, by checks | environment-1 | refund_payment@v1-abc |"
    )
    assert f"{row} alone: better | release 3 |" in told
    assert f"`episodes/index.html` in the folder of round `{made.round.id}`, and in MLflow's run of it." in told
    linked = prefect_summary(made.stored, made.figures(), "http://ml:5000/#/experiments/1/runs/r")
    assert "[MLflow's run of it](http://ml:5000/#/experiments/1/runs/r)" in linked


def test_a_round_that_stopped_early_has_an_index_that_says_so(store: Store, tmp_path: Path) -> None:
    empty = store.start_round("shop", "data-one", 7, "laptop", {})
    from tasks.round.stored import StoredRound

    figures = Practised(store).figures().model_copy(update={"capabilities": [], "release": None})
    index = write_pages(StoredRound(store, empty), figures, tmp_path, str)
    assert [p.name for p in index.parent.iterdir()] == ["index.html"]
    assert "No capability was selected" in index.read_text(encoding="utf-8")
    assert "No episode was played" in index.read_text(encoding="utf-8")


def test_the_command_writes_what_is_gone_again(settings: Settings) -> None:
    from flows.cli.main import app

    settings.folder.mkdir()
    with open_store(settings.database_url) as store:
        made = Practised(store)
    done = CliRunner().invoke(app, ["report", "--home", str(settings.folder)])
    assert done.exit_code == 0, done.output
    folder = settings.folder / made.round.id
    assert done.stdout.strip() == str(folder / "report.html")
    assert (folder / "episodes" / "index.html").is_file()


def test_a_home_that_cannot_be_written_is_said_with_what_to_do(
    store: Store, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Practised(store)

    def refused(*given: object, **more: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refused)
    folder = re.escape(str(settings.folder / made.round.id))
    with pytest.raises(StoreError, match=rf"cannot be written to {folder} \(Read-only file system\); make the home"):
        write_report(settings, store, made.figures())


def test_pages_written_again_leave_none_of_those_before(store: Store, tmp_path: Path) -> None:
    made = Practised(store)
    index = write_pages(made.stored, made.figures(), tmp_path, str)
    (index.parent / "train-gone.html").write_text("old")
    write_pages(made.stored, made.figures(), tmp_path, str)
    assert not (index.parent / "train-gone.html").exists()


def test_a_page_never_passes_its_bytes_and_counts_what_it_leaves_out(store: Store) -> None:
    made = Practised(store, steps=8)
    page = next(p for p in pages_of(made.stored, made.figures(), str) if p.title == CAPABILITY)
    whole, _ = render_page(page, made.figures())
    assert "16 of 16 groups are shown." in whole
    cut, shown = render_page(page, made.figures(), most_bytes=len(whole) // 3)
    assert len(cut) < len(whole) // 2
    assert 0 < shown < 16
    assert cut.count('class="group"') == shown
    assert f"{shown} of 16 groups are shown; {16 - shown} are left out" in cut


def test_the_index_says_how_many_groups_each_page_has(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.episodes.pages.MOST_BYTES", 6_000)
    made = Practised(store, steps=8)
    index = write_pages(made.stored, made.figures(), tmp_path, str)
    page = (index.parent / f"train-{CAPABILITY}.html").read_text(encoding="utf-8")
    shown = page.count('class="group"')
    assert 0 < shown < 16
    row = index.read_text(encoding="utf-8").split(f'href="train-{CAPABILITY}.html">{CAPABILITY}<')[-1]
    assert re.findall(r"<td>(\d+)</td>", row)[:2] == [str(shown), "16"]


def test_checks_that_a_page_leaves_out_are_counted_and_those_missed_are_all_in_the_trace(store: Store) -> None:
    made = Practised(store, steps=0)
    checks = [CheckRow(f"call-{i:02}", CAPABILITY, True, False, "") for i in range(30)]
    given = {"purpose": "training", "adapter_id": ADAPTER, "checks": checks}
    row = store.trajectory(made.episode("p", "refund-9", 700_021, 0, 0.0, **given))
    page = next(p for p in pages_of(made.stored, made.figures(), str) if p.title == CAPABILITY)
    text, _ = render_page(page, made.figures())
    assert text.count('<li class="bad"') == MOST_CHECKS
    assert "10 more checks are left out" in text
    assert trace_of(row, page.groups.groups[0], CAPABILITY, str).outputs["checks missed"] == [c.name for c in checks]


def test_keys_and_passwords_of_the_settings_are_on_no_page(
    store: Store, settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "HOOK": "https://hooks.example/T0/secret-666666",
        "ANALYST_KEY": "sk-analyst-key-1", "AUTHOR_KEY": "sk-author-key-7", "SERVER_KEY": "server-key-22",
        "TRACE_GATEWAY_KEYS": "gateway-key-333,short",
        "TRACE_DATABASE": "postgresql://trace:p%40ssword-4444@db/trace?password=in-query-88", "TRACE_TRACKING": "http://me:track-55555@ml",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = load_settings(
        analyst={"api_key_variable": "ANALYST_KEY", "api_base": "http://me:of-analyst-1@llm/v1"},
        synthesizer={"api_key_variable": "AUTHOR_KEY", "api_base": "http://me:of-author-22@llm/v1"},
        policy={"api_key_env": "SERVER_KEY", "url": "http://me:of-server-3@a:8000,http://me:of-server-4@b:8000"},
        home=settings_folder,
        unattended={"webhook_variable": "HOOK"},
    )
    secrets = ["sk-analyst-key-1", "sk-author-key-7", "server-key-22", "gateway-key-333", "p%40ssword-4444",
               "p@ssword-4444", given["HOOK"], "track-55555", "in-query-88", "of-analyst-1", "of-author-22",
               "of-server-3", "of-server-4"]  # fmt: skip
    assert sorted(secrets_of(settings)) == sorted(secrets), "a short one would tear words apart"
    made = Practised(store)
    leak = [
        {"role": "tool", "content": json.dumps(dict.fromkeys(secrets, 1))},
        {"role": "assistant", "tool_calls": [{"name": "say", "arguments": {"key": s}} for s in secrets]},
    ]
    made.episode("p", "leak-1", 700_021, 0, 1.0, purpose="training", adapter_id="adapter-1", messages=leak)
    capability, _ = made.figures().capabilities
    told = capability.model_copy(update={"definition": f"It fails like this: {secrets}", "reasons": secrets})
    figures = made.figures().model_copy(update={"capabilities": [told], "stopped": f"ProviderError: {secrets}"})
    text = write_report(settings, store, figures)
    assert text.count(HIDDEN) > 2 * len(secrets)
    pages = (settings.folder / made.round.id / EPISODES).iterdir()
    text += "".join(page.read_text(encoding="utf-8") for page in pages)
    assert [s for s in secrets if s in text] == []


def test_a_key_is_hidden_as_json_writes_it(
    store: Store, settings_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = 'pä"ss\\word-12345'
    monkeypatch.setenv("ANALYST_KEY", key)
    hide = hiding(load_settings(analyst={"api_key_variable": "ANALYST_KEY"}, home=settings_folder))
    documents = [key, json.dumps({"key": key}), json.dumps({"key": key}, ensure_ascii=False)]
    messages = [
        *({"role": "tool", "content": text} for text in documents),
        {"role": "assistant", "tool_calls": [{"name": "say", "arguments": {"it": text}} for text in documents]},
    ]
    row = store.trajectory(Practised(store, steps=0).episode("p", "leak-1", 1, 0, 1.0, messages=messages))
    shown = shown_episode(row, hide)
    texts = [text for turn in shown.turns for text in (turn.text, *turn.calls) if text]
    assert len(texts) == 6
    assert [text for text in texts if HIDDEN not in text or "word-12345" in text] == []


def test_file_names_hold_no_way_out_of_the_folder() -> None:
    assert slug("../../etc/Passwd") == "-etc-passwd"
    assert len(slug("x" * 500)) == 80


@pytest.mark.integration
@pytest.mark.parametrize("width", [1280, 375])
def test_a_person_clicks_from_the_report_to_a_group_and_filters(store: Store, settings: Settings, width: int) -> None:
    if BROWSER is None:
        pytest.skip("no browser is installed; tests/ensure_chromium.sh brings one")
    from playwright.sync_api import sync_playwright

    made = Practised(store)
    write_report(settings, store, made.figures())
    said: list[str] = []
    with sync_playwright() as playwright:
        opened: Any = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        page = opened.new_page(viewport={"width": width, "height": 800})
        page.on("console", lambda message: said.append(message.text))
        page.goto((settings.folder / made.round.id / "report.html").as_uri())
        page.get_by_role("link", name="episodes side by side").click()
        page.get_by_role("link", name="refund_payment@v1-abc").click()
        groups = page.locator(".group")
        assert groups.count() == 4
        page.get_by_role("radio", name="none succeeded").check()
        assert [g.is_visible() for g in groups.all()] == [True, False, True, False]
        page.get_by_role("link", name="episodes").click()
        page.get_by_role("link", name="test split").click()
        page.get_by_role("radio", name="status").check()
        assert [g.is_visible() for g in page.locator(".group").all()] == [True, False, True]
        page.get_by_role("radio", name="solved by both").check()
        assert [g.is_visible() for g in page.locator(".group").all()] == [False, False, True]
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"the page is {wide} wide on a screen of {width}"
        opened.close()
    assert said == []
