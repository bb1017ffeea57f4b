"""The report: one page without outside requests that holds the figures, whatever the round came to."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser

import pytest
from pydantic import ValidationError
from report_samples import (
    first_promoted,
    full_round,
    later_round,
    mastered_round,
    noise_round,
    not_better_round,
    nothing_lacking,
    nothing_selected,
    other_data,
    refused_round,
    stopped_round,
    untrained_round,
    with_generalist,
    written_round,
)
from rich.console import Console

from tasks.reporting.figures import RoundFigures, RouterFigures, duration
from tasks.reporting.headline import headline
from tasks.reporting.page import render
from tasks.reporting.summary import print_summary

VOID = {"meta", "link", "img", "br", "hr", "input"}
ROUNDS = {
    "full": full_round,
    "noise": noise_round,
    "stopped": stopped_round,
    "nothing": nothing_selected,
    "written": written_round,
    "first": first_promoted,
    "later": later_round,
    "refused": refused_round,
    "not better": not_better_round,
    "nothing lacking": nothing_lacking,
    "mastered": mastered_round,
    "untrained": untrained_round,
    "other data": other_data,
    "generalist": with_generalist,
}


class Page(HTMLParser):
    """Collects tags, attributes, table cells and text; fails on tags that do not nest."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.words.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def row(self, first: str) -> list[str]:
        return next([cell.strip() for cell in row] for row in self.rows if row and row[0].strip() == first)


@pytest.mark.parametrize("name", ROUNDS)
def test_the_page_asks_nothing_of_the_outside_and_nests(name):
    source = render(ROUNDS[name]())
    page = Page(source)
    for tag, attributes in page.tags:
        assert tag not in {"script", "link", "img", "iframe", "object", "embed", "base", "a", "use", "image"}
        assert not {"src", "href", "srcset", "xlink:href", "action", "data", "background"} & set(attributes)
        assert not any(key.startswith("on") for key in attributes)
    style = re.search(r"<style>(.*?)</style>", source, re.S).group(1)
    assert "url(" not in style
    assert "@import" not in style
    assert "prefers-color-scheme:dark" in style
    assert "@media print" in style
    assert source.count("<svg") == sum(tag == "svg" for tag, _ in page.tags)
    for tag, attributes in page.tags:
        if tag == "svg":
            assert attributes["role"] == "img"
            assert len(attributes["aria-label"]) > 20
    assert ("html", {"lang": "en"}) in page.tags
    assert len(source) < 120_000


def test_every_figure_of_a_full_round_is_on_the_page():
    figures = full_round()
    page = Page(render(figures))
    assert page.row("set_address") == ["set_address", "10.0 % (3–28)", "80.0 % (60–91)", "+70.0", "0.0 %", "60"]
    assert page.row("all")[1:5] == ["42.5 % (33–52)", "61.3 % (51–70)", "+18.8", "5.0 %"]
    assert page.row("set_delivery_address")[1:4] == ["0.41", "0.62", "10/10"]
    assert page.row("set_delivery_address")[-1] == "promoted"
    assert page.row("no adapter") == ["no adapter", "42", "3"]
    totals = [[cell.strip() for cell in row] for row in page.rows if row[0].strip() == "total"]
    assert totals == [["total", "1,893.4"], ["total", "1,904,211"]]
    assert page.row("practice") == ["practice", "511,000"], "tokens are those of a purpose, which is no stage"
    assert page.row("8") == ["8", "0.950", "94.0 %", "93.0 %"]
    for said in (
        headline(figures), "rose from 42.5 % to 61.3 %", "9b1e6b0c2d4f8a37", "torch 2.13.0", "q4_1-98f2",
        "0.1.0+6a9846f",
        "2 episodes were lost", "accepted on informative groups alone", "<success> 0.98 is above 0.6", "versions/1",
        "reward-misspecified", "unsynthesizable", "0 of 10 runs reach", "Not trained: unsynthesizable", "31 min 33 s",
        "succeeded in 50.0 % of its environment’s fresh scenarios (before: 25.0 %) and in 2 of 24 episodes on 12",
        "Training begins from set_address 58 %; compared with base 25 % (success on fresh scenarios",
    ):  # fmt: skip
        assert said in page.text, said
    assert sum(tag == "svg" for tag, _ in page.tags) == 7


def test_the_verdict_is_honest():
    assert "That is within noise" in headline(noise_round())
    assert "below 13.1 points could not have been seen" in headline(noise_round())
    assert "set_delivery_address (underpowered)" in headline(noise_round())
    worse = full_round().model_copy(
        update={"difference": full_round().difference.model_copy(update={"points": -9.0, "low": -15.0, "high": -3.0})}
    )
    assert "fell" in headline(worse)
    assert "rose" not in headline(worse)


def test_missing_parts_give_their_reason():
    page = Page(render(stopped_round()))
    assert page.text.count("the budget of 40 rollouts is spent.") >= 4
    assert all(tag != "svg" for tag, _ in page.tags)
    page = Page(render(nothing_selected()))
    assert "None of 1 candidates reached the selection thresholds" in page.text
    assert "Nothing was trained" in page.text


def test_text_from_models_is_escaped():
    evil = full_round().capabilities[0].model_copy(update={"name": "<script>alert(1)</script>", "verdict": '"><b>'})
    source = render(full_round().model_copy(update={"capabilities": [evil]}))
    assert "<script" not in source
    assert "<b>" not in source


def test_figures_survive_json_and_refuse_nonsense():
    figures = full_round()
    assert RoundFigures.model_validate(json.loads(json.dumps(figures.as_json()))) == figures
    spec = {
        "round",
        "target",
        "data_hash",
        "seed",
        "base",
        "routed",
        "difference",
        "families",
        "capabilities",
        "router",
    }
    assert spec | {"seconds", "tokens", "peak_gib"} <= set(figures.as_json())
    with pytest.raises(ValidationError):
        RoundFigures(round="r", target="t", data_hash="h", seed=0, typo=1)
    with pytest.raises(ValidationError, match="confusion counts"):
        RouterFigures(accuracy=1, labels=["a", "b"], counts=[[1]])
    with pytest.raises(ValidationError):
        RouterFigures(accuracy=float("nan"))


@pytest.mark.parametrize("name", ROUNDS)
def test_the_summary_prints_anywhere(name):
    console = Console(file=io.StringIO(), width=110)
    print_summary(ROUNDS[name](), console)
    text = console.file.getvalue()
    assert re.sub(r"\s+", " ", headline(ROUNDS[name]())) in re.sub(r"\s+", " ", text)
    if name == "full":
        assert "+70.0 points" in text
        assert "1,904,211 sampled tokens" in text, "what was read is not among them, as it is in limits.tokens"


def test_nothing_is_cut_from_the_summary_on_a_narrow_terminal():
    long = "hand_over_the_customer_to_a_colleague"
    data = later_round().model_dump(mode="json")
    data["capabilities"][0] |= {"name": long, "verdict": "reward-misspecified"}
    data["families"][long] = data["families"]["refund"]
    console = Console(file=io.StringIO(), width=80)
    print_summary(RoundFigures.model_validate(data), console)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    tables = "\n".join(lines).partition("Success by family")[2]
    families, _, capabilities = tables.partition("Capabilities")
    for part in (families, capabilities):
        first = "".join(line.split("│")[1].strip() for line in part.splitlines() if line.startswith("│"))
        assert long in first
        assert "…" not in part.partition("The rounds")[0]
    assert "reward-misspecified" in "".join(
        line.split("│")[-2].strip() for line in capabilities.splitlines() if line.startswith("│")
    )


def test_durations():
    assert [duration(s) for s in (1.25, 59.96, 61, 3599.7, 7620)] == [
        "1.2 s",
        "60.0 s",
        "1 min 01 s",
        "1 h 00 min",
        "2 h 07 min",
    ]


def test_what_a_language_model_did_and_cost_is_on_the_page() -> None:
    source = render(written_round())
    words = " ".join(Page(source).words)
    for text in (
        "hosted_vllm/writer: 1,234 calls, 56,789 + 4,321 tokens, 1.5000 dollars; 9 of 10 labelling runs complete",
        "Named and judged the capabilities: openai/rater. Wrote the environments: hosted_vllm/writer. 2 accepted (1",
        "from the bank), at 0.1250 dollars, 2.5 calls and 12,345 tokens each.",
        "version 1 no module (sandbox: bubblewrap): model: refused",
        "static: import of os is forbidden",
        "version 3 def456def456 (sandbox: bubblewrap): accepted",
        "version 4 0123456789ab (sandbox: bubblewrap, from the bank): accepted",
        "fedcba987654 : static: the constant LEVELS is missing",
        "not-trainable",
        "No environment could train it (broken tool)",
        "0.72",
        "0.61",
    ):
        assert text in re.sub(r"\s+", " ", words), text
    assert "<script>alert" not in source
    assert "language model" not in render(full_round())


def test_what_was_live_before_and_after_is_on_the_page() -> None:
    page = Page(render(later_round()))
    assert page.row("all")[1:5] == ["42.5 % (33–52)", "55.0 % (46–64)", "61.3 % (51–70)", "+18.8"]
    assert page.row("set_address")[2:4] == ["55.0 % (40–95)", "80.0 % (60–91)"]
    for said in (
        headline(later_round()), "release 2, 46.0 % to 64.0 %", "release 5, 51.2 % to 70.4 %", "looked at by 3 rounds",
        "points to what was live, p = 0.018", "as a whole against release 2 on validation", "detectable 6.9",
        "As a whole: +7.1 points", "Its adapter alone: better", "The live release has a version of it",
        "Training ended: solved", "The weights after step 7 were taken",
        "95.1 % of 41 examples right that were kept out of its votes. The share is too high: what is right is told",
        "below a probability of 0.62", "5; live before it: release 2",
        "unlike all of them is answered by the base",
    ):  # fmt: skip
        assert said in page.text, said
    steps = {row[0]: row for row in page.rows if len(row) == 4}
    assert steps["4"] == ["4", "–", "–", "89.0 %"]  # it lost all of its own episodes
    assert steps["8"] == ["8", "0.950", "94.0 %", "81.0 %"]


def test_a_linear_routers_share_is_told_as_of_fits_without_the_example() -> None:
    data = later_round().model_dump(mode="json")
    data["router"] |= {"mode": "linear", "threshold": 0.0}
    said = Page(render(RoundFigures.model_validate(data))).text
    assert "95.1 % of 41 examples right, each by a fit without it." in said
    assert "too high" not in said


def test_the_rounds_so_far_are_drawn_and_told() -> None:
    source = render(later_round())
    page = Page(source)
    refused = page.row("r3")
    assert refused[1:4] == ["–", "2026-11-19", "release 3 (refused): new: find_order-and-set; gone: find_order"]
    third = next(row for row in page.rows if row[:1] == ["3"] and len(row) > 8)
    assert "Other data (9b1e6b0c2d4f): the rounds above do not compare." in third[3]
    assert [cell.strip() for cell in third[4:]] == ["55.0 % (46–64)", "42.5 %", "promoted", "33 min 31 s", "1.25"]
    (chart,) = [a["aria-label"] for tag, a in page.tags if tag == "svg" and "by round" in a["aria-label"]]
    assert "round 3: 55.0 % (release 2); round 4: 55.0 %; round 5: 61.3 % (release 5)" in chart
    # Four tested rounds, one of which left what was live; lines end where the data became other data.
    svg = re.search(r"<svg[^>]*by round.*?</svg>", source, re.S).group(0)
    assert svg.count("routed dot") == 4
    assert svg.count("routed dot hollow") == 1
    assert [len(points.split()) for points in re.findall(r'class="routed curve" points="([^"]*)"', svg)] == [3]
    assert svg.count('class="threshold"') == 1


def test_many_rounds_are_a_band_and_few_labels() -> None:
    data = later_round().model_dump(mode="json")
    data["history"] = [data["history"][-1] | {"round": i + 1} for i in range(400)]
    source = render(RoundFigures.model_validate(data))
    svg = re.search(r"<svg[^>]*by round.*?</svg>", source, re.S).group(0)
    assert "routed dot" not in svg
    assert svg.count("routed band") == 1
    assert svg.count("axis middle") <= 12
    assert "<details><summary>Table of 400 rows" in source


def test_figures_from_before_there_were_releases_are_read_and_shown() -> None:
    """`figures.json` as rounds wrote it before rounds had a number or a release."""
    old = full_round().model_dump(mode="json")
    for name in (
        "number", "before", "after", "data_before", "ending", "live", "gain", "looks", "release", "history",
    ):  # fmt: skip
        del old[name]
    for name in ("alone", "renewed", "ending", "chosen"):
        for capability in old["capabilities"]:
            del capability[name]
    for name in ("right", "calibration", "mode", "threshold", "unlike"):
        del old["router"][name]
    page = Page(render(RoundFigures.model_validate(old)))
    assert "Round by round" not in page.text
    assert "Live after" not in page.text
    assert "Routed" in page.text


def test_the_summary_says_what_was_live_before_and_after() -> None:
    console = Console(file=io.StringIO(), width=150)
    print_summary(later_round(), console)
    text = re.sub(r"\s+", " ", console.file.getvalue())
    for said in (
        "On the test split (look 3): the bare base 42.5 % (33–52), before (release 2) 55.0 % (46–64), "
        "after (release 5) 61.3 % (51–70).",
        "+25.0 points",  # on set_address, against what was live
        "rejected-regression",
        "2026-11-18, EnvironmentFault",
        "33 min 31 s, 1.25 dollars",
    ):
        assert said in text, said


def test_what_no_rule_selected_has_no_figures_of_the_rule() -> None:
    """The generalist is on the page and in the table, last of what was selected, and not among the bars."""
    page = Page(source := render(with_generalist()))
    (row,) = (row for row in page.rows if row[:1] == ["generalist"] and len(row) > 5)
    assert row[1:4] == ["–"] * 3
    assert "generalist: coverage" not in source
    assert "it learns from all that has succeeded" in source
    assert "it learns from all that has succeeded" not in render(full_round())
    assert "answered by generalist, which solves more than what was live on all families together" in " ".join(
        page.words
    )
    console = Console(file=io.StringIO(), width=110)
    print_summary(with_generalist(), console)
    (line,) = (line for line in console.file.getvalue().splitlines() if "generalist" in line and "│" in line)
    assert line.count("–") == 3


def test_what_is_told_of_a_routers_examples_is_of_the_first_where_it_was_fitted_again():
    router = RouterFigures(right=0.95, calibration=20, mode="linear")
    figures = later_round().model_copy(update={"router": router})
    assert "The router that the round fitted sent 95.0 % of 20 examples right" in render(figures)
    left = figures.model_copy(update={"release": figures.release.model_copy(update={"left": ["refund", "coupon"]})})
    said = "fitted first, before one that leaves refund, coupon to what answered before, sent 95.0 % of 20 examples"
    assert said in render(left)
