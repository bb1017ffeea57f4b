"""What stands on the pages can be read: words and figures against what they stand on, and labels that say what a figure
is of."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from report_samples import full_round

from tasks.reporting.charts import confusion_chart, curve_chart, heat_chart, selection_chart
from tasks.reporting.figures import RouterFigures, SelectionRule
from tasks.reporting.page import TEMPLATES, render
from tasks.reporting.summary import print_summary

# Least contrast of ordinary text (WCAG 2.2, success criterion 1.4.3).
LEAST = 4.5


def palettes() -> list[dict[str, tuple[float, ...]]]:
    """Colours by name, red, green and blue from 0 to 255: of light, of dark, of paper."""
    style = (TEMPLATES / "style.css.j2").read_text(encoding="utf-8")
    found = []
    for block in re.findall(r":root\{(.*?)\}", style):
        colours = dict(re.findall(r"--(\w+):#([0-9a-f]+)", block))
        whole = {name: c if len(c) == 6 else "".join(2 * x for x in c) for name, c in colours.items()}
        found.append({name: tuple(int(c[i : i + 2], 16) for i in (0, 2, 4)) for name, c in whole.items()})
    assert len(found) == 3
    return found


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    def luminance(colour: tuple[float, ...]) -> float:
        parts = [x / 255 for x in colour]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("palette", palettes(), ids=["light", "dark", "print"])
def test_words_of_every_colour_can_be_read(palette: dict[str, tuple[float, ...]]) -> None:
    for ink in ("ink", "soft", "base", "routed", "live", "good", "bad"):
        assert contrast(palette[ink], palette["card"]) >= LEAST, ink
    for ink in ("ink", "soft", "routed"):
        assert contrast(palette[ink], palette["bg"]) >= LEAST, ink
    assert contrast(palette["warnink"], palette["warn"]) >= LEAST


@pytest.mark.parametrize("palette", palettes(), ids=["light", "dark", "print"])
def test_the_number_in_a_full_cell_can_be_read(palette: dict[str, tuple[float, ...]]) -> None:
    routed = RouterFigures(sent=1.0, labels=["a", "none"], counts=[[7, 0], [0, 0]])
    for chart in (heat_chart({"refund": {"base": 1.0}}, ["base"]), confusion_chart(routed)):
        shade = max(map(float, re.findall(r"opacity:([0-9.]+)", chart)))
        under = tuple(
            shade * top + (1 - shade) * below for top, below in zip(palette["routed"], palette["cell"], strict=True)
        )
        assert contrast(palette["ink"], under) >= LEAST


def test_the_table_of_capabilities_says_what_its_shares_are_of() -> None:
    page = render(full_round())
    assert "Base and adapter: success on fresh scenarios of the capability’s environment" in page
    assert "points and p: the adapter alone against what was live, on validation tasks of its own families" in page


def test_a_training_s_figures_are_said_to_be_without_episodes_that_got_advice() -> None:
    """As the trainer counts them: what succeeded with advice alone is no success of the adapter's."""
    assert "Reward and success over all episodes of a step that got no advice" in render(full_round())


@pytest.mark.parametrize(("rho", "delta"), [(0.1, 0.2), (0.7, 0.9)])
def test_a_threshold_stands_in_its_own_column(rho: float, delta: float) -> None:
    """Also one that no capability comes near."""
    low = [c.model_copy(update={"mean_cov": 0.1, "mean_delta": 0.2}) for c in full_round().capabilities]
    chart = selection_chart(low, SelectionRule(rho=rho, delta=delta))
    first, second = (float(x) for x in re.findall(r'class="threshold" x1="([0-9.]+)"', chart))
    ends = [float(x) for x in re.findall(r'class="axis" x="([0-9.]+)"', chart)]
    assert ends[0] < first <= ends[1] - 30 < second <= 560 - 34


def test_the_numbers_below_a_curve_of_many_points_do_not_cover_one_another() -> None:
    chart = curve_chart("grpo", "episodes", [(16.0 * (i + 1), i / 40) for i in range(40)])
    at = [float(x) for x in re.findall(r'class="axis middle" x="([0-9.]+)" y="192.0"', chart)]
    assert at[0] == 50.0, "the first"
    assert at[-1] == 498.0, "and the last"
    assert min(b - a for a, b in pairwise(at)) > 30
    assert chart.count("<circle") == 40


def test_what_a_reason_says_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(full_round().model_copy(update={"warnings": ("the tool answered :key: and :warning:",), "errors": 1}))
    said = " ".join(capsys.readouterr().out.split())
    assert "the tool answered :key: and :warning:" in said
    assert "1 episode was lost" in said
