"""The headline: one for each way in which a round can end, from its figures alone."""

from __future__ import annotations

import io

import pandas as pd
import pytest
from report_samples import (
    first_promoted,
    full_round,
    later_round,
    mastered_round,
    not_better_round,
    nothing_lacking,
    other_data,
    refused_round,
    untrained_round,
    within_noise,
)
from rich.console import Console

from tasks.measuring.gate_plan import GateRules, Look
from tasks.measuring.gate_rules import judge_release
from tasks.reporting.figures import AT_WORK, RoundFigures
from tasks.reporting.headline import deciding_reason, headline, tone, unsaid
from tasks.reporting.page import render
from tasks.reporting.summary import print_summary

GOES_ON = (
    "Release 2 goes on at 55.0 % on the test split (95 % interval 46.0 to 64.0 %); the bare base stands at 42.5 %."
)


def test_the_first_release() -> None:
    assert headline(first_promoted()) == (
        "Release 1 is live: success on shop rose from 42.5 % (the bare base) to 61.3 %: +18.8 points "
        "(95 % interval +8.9 to +27.6, p = 0.0006, 60 tasks). New: set_delivery_address."
    )
    assert tone(first_promoted()) == "good"


def test_a_release_whose_test_split_is_being_played_is_not_said_to_be_left_untested() -> None:
    """It is live from the gate on, and its episodes on the test split may take hours."""
    playing = first_promoted().model_copy(
        update={"live": None, "routed": None, "base": None, "gain": None, "collected": False, "stopped": AT_WORK}
    )
    said = headline(playing)
    assert said == "Release 1 is live; what it comes to on the test split is not collected. New: set_delivery_address."


def test_a_later_release_is_compared_with_what_was_live_and_the_base_in_passing() -> None:
    assert headline(later_round()) == (
        "Release 5 is live: success on shop rose from 55.0 % (release 2) to 61.3 %: +6.2 points (95 % interval +1.1 to "
        "+11.4, p = 0.018, 60 tasks). New: cancel_order; renewed: set_delivery_address. The bare base stands at 42.5 %."
    )
    assert tone(later_round()) == "good"


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("rolled-back", "Release 5 became live and has been rolled back since: success on shop rose from 55.0 %"),
        ("retired", "Release 5 became live and has been replaced since: success on shop rose from 55.0 %"),
        ("live", "Release 5 is live: success on shop rose from 55.0 %"),
    ],
)
def test_a_release_that_somebody_left_while_the_test_split_was_played_is_not_called_live(state: str, said: str) -> None:
    data = later_round().model_dump(mode="json")
    data["release"]["state"] = state
    data["capabilities"][0]["champion"] = None
    figures = RoundFigures.model_validate(data)
    assert headline(figures).startswith(said)
    assert ("; live</dd>" in render(figures)) is (state == "live")


def test_what_fell_and_is_answered_as_before_is_named() -> None:
    data = later_round().model_dump(mode="json")
    data["release"]["left"] = ["cancel_other"]
    said = headline(RoundFigures.model_validate(data))
    assert "New: cancel_order; renewed: set_delivery_address; answered as before: cancel_other. The bare" in said


def test_rates_that_lost_tasks_move_are_not_told_as_a_change_nor_hidden() -> None:
    data = within_noise().model_dump(mode="json")
    data["gain"] |= {"points": 0.0, "low": -4.0, "high": 4.0, "p": 1.0, "tasks": 57, "mde": 100.0}
    said = headline(RoundFigures.model_validate(data))
    assert "went from 55.0 % (release 2) to 61.3 %: +0.0 points" in said
    assert "p = 1.000, 57 tasks that both finished). That is within noise. With so few tasks no change could" in said
    data["routed"] = data["live"]
    assert "stayed at 55.0 % (release 2) (95 % interval -4.0 to +4.0, p = 1.000, 57 tasks)." in headline(
        RoundFigures.model_validate(data)
    )


def test_noise_on_test_is_called_noise_with_what_the_gate_saw() -> None:
    said = headline(within_noise())
    assert "went from 55.0 % (release 2) to 61.3 %: +2.5 points" in said
    assert "That is within noise. A change below 7.9 points could not have been seen reliably." in said
    assert "On validation, where the gate looked, it was +7.1 points (p = 0.0040)." in said
    assert "rose" not in said
    assert tone(within_noise()) == "flat"


def test_a_fall_on_test_is_called_one() -> None:
    data = later_round().model_dump(mode="json")
    data["gain"] |= {"points": -6.2, "low": -11.0, "high": -1.4}
    said = headline(RoundFigures.model_validate(data))
    assert "success on shop fell from 55.0 %" in said
    assert tone(RoundFigures.model_validate(data)) == "bad"


def test_a_candidate_that_was_refused_and_why() -> None:
    assert headline(refused_round()) == (
        "Release 4 was refused (rejected-regression): refund: fell by 11.7 points over 30 tasks (90 % interval -20.1 "
        f"to -3.3, below zero). {GOES_ON}"
    )
    assert tone(refused_round()) == "flat"


def test_adapters_of_which_none_was_better() -> None:
    assert headline(not_better_round()) == (
        f"No adapter was better than what answers today: set_delivery_address (underpowered). {GOES_ON}"
    )


@pytest.mark.parametrize(
    ("figures", "said", "good"),
    [
        (nothing_lacking(), "Nothing is lacking that could be trained: release 2 solved all of it. The round ends "
         "early and well.", True),
        (mastered_round(), "Mastered: release 2 solves the environments of what it seemed to lack.", True),
        (untrained_round(), "No capability could be trained. Release 2 solved 3 of 96 episodes.", False),
    ],
)  # fmt: skip
def test_without_an_adapter_a_good_end_is_no_failure(figures: RoundFigures, said: str, good: bool) -> None:
    assert headline(figures) == f"{said} {GOES_ON}"
    assert tone(figures) == ("good" if good else "flat")
    assert "stopped early" not in headline(figures)


def test_other_data_of_the_target_is_said_first() -> None:
    said = headline(other_data())
    assert said.startswith("The data of shop changed (77aa19c04be8 to 9b1e6b0c2d4f): a new lineage begins, and figures")
    assert said.endswith(headline(later_round()))


def test_a_round_that_was_promoted_but_not_yet_tested() -> None:
    figures = later_round().model_copy(update={"gain": None, "live": None, "routed": None})
    assert headline(figures).startswith("Release 5 is live, and was not played on the test split. New: cancel_order")


@pytest.mark.parametrize(
    ("stopped", "said"),
    [
        ("EpisodesLost: all episodes were lost", "The round stopped early: EpisodesLost: all episodes were lost"),
        (AT_WORK, "The round is not over: its figures come with its report."),
    ],
)
def test_a_round_that_has_come_behind_its_gate_and_not_to_its_report_says_so(stopped: str, said: str) -> None:
    """The headline is about what the gate said."""
    changes = {"gain": None, "live": None, "routed": None, "collected": False, "ending": "", "stopped": stopped}
    figures = later_round().model_copy(update=changes)
    assert said not in headline(figures)
    assert unsaid(figures) == said
    print_summary(figures, Console(file=(text := io.StringIO()), width=200))
    assert f"Warning: {said}" in text.getvalue()
    assert f"<li>{said}</li>" in render(figures)
    assert unsaid(later_round()) == unsaid(untrained_round()) == unsaid(mastered_round()) == ""


def test_figures_from_before_there_were_releases_say_what_they_said() -> None:
    assert headline(full_round()) == (
        "Success on shop rose from 42.5 % to 61.3 %: +18.8 points (95 % interval +8.9 to +27.6, p = 0.0006, 60 tasks). "
        "Promoted: set_delivery_address."
    )


@pytest.mark.parametrize(
    ("verdict", "reasons", "why"),
    [
        (
            "rejected-not-better",
            ["As a whole: -1.", "a: fell by 3 points, may be noise.", "The release did not gain."],
            2,
        ),
        ("underpowered", ["As a whole: +4.", "a: fell by 3 points, may be noise.", "b: fell by 4 points."], 1),
        ("underpowered", ["As a whole: +4.", "a: fell by 3 points: within its resolution.", "Only a gain of 9."], 2),
        ("rejected-regression", ["As a whole: +4.", "a: fell by 9 points.", "The release did not gain."], 1),
    ],
)
def test_the_reason_that_decides(verdict: str, reasons: list[str], why: int) -> None:
    assert deciding_reason(verdict, reasons) == reasons[why]


def fell(name: str, lost: int, count: int = 10) -> pd.DataFrame:
    other = [0.0] * lost + [1.0] * (count - lost)
    return pd.DataFrame({"task": [f"{name}-{i}" for i in range(count)], "family": name, "base": 1.0, "other": other})


GAIN = fell("address", 5, 20).assign(base=0.0)


@pytest.mark.parametrize(
    ("pair", "settled", "left", "why"),
    [
        ([fell("coupon", 2), fell("refund", 1)], None, {}, "all other families together: fell by 15.0"),
        ([fell("coupon", 2), fell("refund", 1), fell("steady", 0, 600)], None, {}, "coupon: fell by 20.0"),
        ([fell("coupon", 2), fell("refund", 7), fell("steady", 0, 600)], None, {}, "refund: fell by 70.0"),
        ([fell("coupon", 2), fell("steady", 0, 600)], fell("coupon", 8, 20), {}, "coupon: -20.0 points over 10 tasks"),
        ([fell("coupon", 2), fell("refund", 2), fell("steady", 0, 600)], fell("refund", 0, 20), {}, "coupon: fell by"),
        (
            [fell("coupon", 7), fell("steady", 0, 600)],
            None,
            {"refund": "refund: fell by 30.0 points over 10 tasks."},
            "coupon: fell by 70.0",
        ),
    ],
)
def test_the_reason_that_decides_is_one_that_blocks(
    pair: list[pd.DataFrame], settled: pd.DataFrame | None, left: dict[str, str], why: str
) -> None:
    if settled is not None:
        settled["task"] = "more-" + settled["task"]
    own = {"set_address": ("address",)}
    decision = judge_release(pd.concat([GAIN, *pair]), GateRules(), Look(0.05), 1, own, settled=settled, left=left)
    said = deciding_reason(str(decision.verdict), list(decision.reasons))
    assert said.startswith(why)
    assert said in {fall.reason for fall in (*decision.falls.values(), *decision.wholes.values()) if fall.blocks}


def test_without_reasons_there_is_none() -> None:
    assert deciding_reason("underpowered", []) == ""
