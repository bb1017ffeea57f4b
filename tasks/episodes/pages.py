"""The pages of a round's episodes, beside `report.html`: static, without a script, a font or a request to anywhere.

    runs/ROUND/episodes/index.html            the way from failure to release, and what is on the other pages
    runs/ROUND/episodes/diagnosis.html        what failed, with labels
    runs/ROUND/episodes/train-CAPABILITY.html GRPO groups side by side
    runs/ROUND/episodes/test.html             before and after on the test split

They are bounded: so many groups a page, episodes a group, turns and checks an episode and characters a text, and each
page says what it leaves out. Families and outcomes are chosen by style alone.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2

from db import AdapterRow, Store
from errors import StoreError
from settings import Settings
from tasks.episodes.groups import Groups, compared_groups, diagnosis_groups, training_groups
from tasks.episodes.lineage import Lineage, lineages_of
from tasks.episodes.secrets import hiding, without_secrets
from tasks.episodes.shown import Hide
from tasks.reporting.figures import GONE, RoundFigures
from tasks.reporting.lookup import EPISODES, REPORT
from tasks.reporting.page import TEMPLATES, environment, render
from tasks.round.results import TrainResult
from tasks.round.stored import StoredRound

INDEX = "index.html"
# One page, in bytes of text: a browser shows it at once. Groups beyond it are left out, and counted.
MOST_BYTES = 2_000_000


@dataclass(frozen=True)
class Page:
    """One page of groups: its file, its heading, what it shows in a sentence, and the groups."""

    file: str
    title: str
    about: str
    groups: Groups

    @property
    def families(self) -> list[str]:
        """The families of its groups."""
        return sorted({g.family for g in self.groups.groups})

    @property
    def outcomes(self) -> list[str]:
        """What its groups came to."""
        return sorted({str(g.outcome) for g in self.groups.groups})


def write_pages(stored: StoredRound, figures: RoundFigures, folder: Path, hide: Hide) -> Path:
    """Write the pages into `folder/episodes`, in place of those that are there; returns the index."""
    pages = pages_of(stored, figures, hide)
    links = {page.title: page.file for page in pages}
    place = folder / EPISODES
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    shown: dict[str, int] = {}
    for page in pages:
        text, shown[page.file] = render_page(page, figures, MOST_BYTES)
        (place / page.file).write_text(text, encoding="utf-8")
    index = place / INDEX
    index.write_text(render_index(lineages_of(stored, figures, links), pages, shown, figures), encoding="utf-8")
    return index


def write_report(settings: Settings, store: Store, figures: RoundFigures) -> str:
    """Write `report.html` with the pages of its episodes into the round's folder; returns the report's text. Pages of
    a round whose figures are gone stay, where there are any. Raises `StoreError` where the folder cannot be written."""
    folder = settings.folder / figures.round
    stored, index = StoredRound(store, store.round(figures.round)), folder / EPISODES / INDEX
    hide = hiding(settings)
    figures = without_secrets(figures, hide)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (figures.stopped == GONE and index.is_file()):
            write_pages(stored, figures, folder, hide)
        html = render(figures, index.relative_to(folder).as_posix())
        (folder / REPORT).write_text(html, encoding="utf-8")
    except StoreError:  # what the store holds, and no folder
        raise
    except OSError as problem:
        raise StoreError(
            f"the report cannot be written to {folder} ({problem.strerror or problem}); make the home writable or free "
            "space there, or look at a copy of it with --home; 'trace-agent status' writes nothing"
        ) from problem
    return html


def pages_of(stored: StoredRound, figures: RoundFigures, hide: Hide) -> list[Page]:
    """The pages that the round has episodes for."""
    pages = [
        Page("diagnosis.html", "diagnosis", "What the round found lacking: evidence first, then other tasks.",
             diagnosis_groups(stored, hide)),
        *(
            Page(f"train-{slug(name)}.html", name, "GRPO groups of its training: episodes from one scenario.",
                 training_groups(stored.store, stored.round.id, adapter, hide))
            for name, adapter in trained_adapters(stored, figures).items()
        ),
        Page("test.html", "test split", "Before and after on held-out tasks, what changed first.",
             compared_groups(stored, hide)),
    ]  # fmt: skip
    return [page for page in pages if page.groups.groups]


def trained_adapters(stored: StoredRound, figures: RoundFigures) -> dict[str, str]:
    """Ids of the adapters that the round trained, by capability."""
    rows = {r.id for r in stored.store.rows(AdapterRow, round_id=stored.round.id)}
    trained = {c.name: stored.found(TrainResult, c.name) for c in figures.capabilities if c.selected}
    return {name: found.adapter for name, found in trained.items() if found and found.adapter in rows}


def slug(name: str) -> str:
    """A name as part of a file's name."""
    return re.sub(r"[^a-z0-9_-]+", "-", name.lower())[:80]


def render_page(page: Page, figures: RoundFigures, most_bytes: int = MOST_BYTES) -> tuple[str, int]:
    """A page of groups as text, as many of them as `most_bytes` take, and how many these are: one at least."""
    one = templates().get_template("group.html.j2")
    parts: list[str] = []
    size = 0
    for group in page.groups.groups:
        part = one.render(g=group, families=page.families, outcomes=page.outcomes)
        size += len(part.encode())
        if size > most_bytes and parts:
            break
        parts.append(part)
    left_out = page.groups.total - len(parts)
    text = templates().get_template("groups.html.j2").render(page=page, f=figures, parts=parts, left_out=left_out)
    return text, len(parts)


def render_index(found: list[Lineage], pages: list[Page], shown: Mapping[str, int], figures: RoundFigures) -> str:
    """The first page as text; `shown` says how many groups each page has, by its file."""
    return templates().get_template("index.html.j2").render(lineages=found, pages=pages, shown=shown, f=figures)


@cache
def templates() -> jinja2.Environment:
    """The templates of this folder, with the report's style and filters."""
    here = Path(__file__).parent
    return environment().overlay(
        loader=jinja2.ChoiceLoader([jinja2.FileSystemLoader(here), jinja2.FileSystemLoader(TEMPLATES)])
    )
