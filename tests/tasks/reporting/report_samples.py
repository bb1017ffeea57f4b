"""Figures of made-up rounds for the tests of the report (and to look at the page with)."""

from __future__ import annotations

from tasks.reporting.figures import RoundFigures

STEPS = [(0.24, 0.04), (0.25, 0.02), (0.38, 0.15), (0.52, 0.33), (0.7, 0.6), (0.86, 0.81), (0.94, 0.92), (0.95, 0.94)]


def full_round() -> RoundFigures:
    rate = {"n": 240, "tasks": 60}
    family = {"n": 60}
    return RoundFigures.model_validate(
        {
            "round": "r1-5f3a",
            "target": "shop",
            "data_hash": "9b1e6b0c2d4f8a37",
            "seed": 7,
            "base": {"success": 0.425, "low": 0.331, "high": 0.525, **rate},
            "routed": {"success": 0.6125, "low": 0.512, "high": 0.704, **rate},
            "noop": {"success": 0.05, "low": 0.017, "high": 0.137, **rate},
            "difference": {"points": 18.75, "low": 8.9, "high": 27.6, "p": 0.0006, "mde": 13.1, "tasks": 60},
            "families": {
                "refund": {
                    "base": 0.9,
                    "routed": 0.9,
                    "base_interval": [0.72, 0.97],
                    "routed_interval": [0.72, 0.97],
                    **family,
                },
                "set_address": {
                    "base": 0.1,
                    "routed": 0.8,
                    "base_interval": [0.03, 0.28],
                    "routed_interval": [0.6, 0.91],
                    "noop": 0.0,
                    **family,
                },
                "cancel_pending_order": {
                    "base": 0.7,
                    "routed": 0.75,
                    "base_interval": [0.5, 0.85],
                    "routed_interval": [0.55, 0.88],
                    "noop": 0.2,
                    **family,
                },
                "order_status": {
                    "base": 0.0,
                    "routed": 0.0,
                    "base_interval": [0, 0.16],
                    "routed_interval": [0, 0.16],
                    **family,
                },
            },
            "capabilities": [
                {
                    "name": "set_delivery_address",
                    "mean_cov": 0.41,
                    "mean_delta": 0.62,
                    "runs_passed": 10,
                    "base_success": 0.1,
                    "adapter_success": 0.8,
                    "adapter": "set_delivery_address@v1-3f9c1a2b",
                    "verdict": "promoted",
                    "version": "1",
                    "link": "http://127.0.0.1:5000/#/models/trace-shop-set_delivery_address/versions/1",
                    "champion": "version 1",
                    "definition": "Change the address of an order to the one the user gives, with all of its parts.",
                    "points": 70.0,
                    "adjusted_p": 0.0002,
                    "reasons": [
                        "Its own tasks: +70.0 points over 15 tasks (95 % interval +38.1 to +86.2), p = 0.0001."
                    ],
                    "calibration": {
                        "accepted": True,
                        "verdict": "accepted on informative groups alone.",
                        "mean_reward": 0.24,
                        "success": 0.04,
                        "informative": 0.71,
                        "version": 2,
                    },
                    "steps": [
                        {"step": i + 1, "reward": r, "success": s, "retention": 1 - 0.01 * i}
                        for i, (r, s) in enumerate(STEPS)
                    ],
                },
                {
                    "name": "report_order_status",
                    "mean_cov": 0.3,
                    "mean_delta": 0.34,
                    "runs_passed": 9,
                    "base_success": 0.0,
                    "adapter_success": None,
                    "verdict": "reward-misspecified",
                    "reasons": ["Mean reward rose from 0.24 to 0.87 while success stayed at 0."],
                    "begun": "begins from set_address 58 %; compared with base 25 %",
                    "transfer": {
                        "step": 3,
                        "before": 0.25,
                        "after": 0.5,
                        "successes": 2,
                        "episodes": 24,
                        "tasks": 12,
                    },
                    "steps": [{"step": i + 1, "reward": 0.24 + 0.07 * i, "success": 0.0} for i in range(9)],
                },
                {
                    "name": "look_up_before_write",
                    "mean_cov": 0.18,
                    "mean_delta": 0.21,
                    "runs_passed": 8,
                    "verdict": "unsynthesizable",
                    "reasons": ["All 5 versions failed calibration: <success> 0.98 is above 0.6."],
                    "calibration": {
                        "accepted": False,
                        "verdict": "too easy.",
                        "mean_reward": 0.98,
                        "success": 0.97,
                        "informative": 0.05,
                        "version": 5,
                    },
                },
                {
                    "name": "ask_for_missing_detail",
                    "mean_cov": 0.12,
                    "mean_delta": -0.08,
                    "runs_passed": 0,
                    "verdict": "not-selected",
                    "selected": False,
                    "reasons": ["0 of 10 runs reach coverage 0.1 and contrast 0.2."],
                },
            ],
            "router": {
                "accuracy": 0.9333,
                "sent": 0.2833,
                "milliseconds": 41.2,
                "labels": ["no adapter", "set_delivery_address"],
                "counts": [[42, 3], [1, 14]],
            },
            "seconds": {
                "total": 1893.4,
                "rollout": 412.0,
                "contrast": 1.9,
                "synthesize": 35.2,
                "calibrate": 301.5,
                "train": 702.3,
                "route": 12.1,
                "evaluate": 428.4,
            },
            "tokens": {
                "total": 1904211,
                "diagnosis": 640112,
                "calibration": 402331,
                "practice": 511000,
                "evaluation": 350768,
            },
            "peak_gib": 3.4,
            "errors": 2,
            "warnings": [
                "set_delivery_address: environment accepted on informative groups alone (success 4 % is below 20 %)."
            ],
            "provenance": {
                "base_model": "SmolLM2-135M-Instruct",
                "base_revision": "q4_1-98f2",
                "code_version": "0.1.0+6a9846f",
                "finished": "2026-11-21 04:10 UTC",
                "profile": "laptop",
                "tracking": "sqlite store",
                "packages": {"torch": "2.13.0", "transformers": "5.23.0", "peft": "0.21.2", "trl": "1.16.0"},
            },
        }
    )


def noise_round() -> RoundFigures:
    """Evaluated, but nothing was better."""
    figures = full_round()
    difference = figures.difference.model_copy(update={"points": 1.7, "p": 0.48, "low": -4.0, "high": 7.0})
    capability = figures.capabilities[0].model_copy(update={"verdict": "underpowered", "champion": None})
    return figures.model_copy(
        update={"difference": difference, "capabilities": [capability, *figures.capabilities[1:]]}
    )


def stopped_round() -> RoundFigures:
    """Nothing but the start."""
    return RoundFigures(
        round="r2", target="shop", data_hash="9b1e", seed=0, stopped="the budget of 40 rollouts is spent."
    )


def nothing_selected() -> RoundFigures:
    figures = full_round()
    return RoundFigures(
        round="r3", target="shop", data_hash="9b1e", seed=0, capabilities=[figures.capabilities[3]], base=figures.base
    )


def written_round() -> RoundFigures:
    """A round in which a model labelled and wrote the environments."""
    data = full_round().model_dump(mode="json")
    data["selection"] |= {"analyst": "llm", "kappa": 0.61}
    data["analyst"] = {
        "model": "hosted_vllm/writer",
        "calls": 1234,
        "prompt_tokens": 56789,
        "sampled_tokens": 4321,
        "dollars": 1.5,
        "stages": {"contrast": 1.25, "synthesize": 0.25},
        "judge": "openai/rater",
        "author": "hosted_vllm/writer",
        "environments": 2,
        "banked": 1,
        "dollars_each": 0.125,
        "calls_each": 2.5,
        "tokens_each": 12345.0,
        "runs": 9,
    }
    data["capabilities"][0] |= {
        "kappa": 0.72,
        "passed_over": {"fedcba987654": "static: the constant LEVELS is missing"},
        "versions": [
            {"number": 1, "accepted": False, "code_hash": "", "sandbox": "bubblewrap", "reasons": ["model: refused"]},
            {
                "number": 2,
                "accepted": False,
                "code_hash": "abc123abc123",
                "sandbox": "bubblewrap",
                "reasons": ["static: import of os is forbidden", "<script>alert(1)</script>"],
            },
            {"number": 3, "accepted": True, "code_hash": "def456def456", "sandbox": "bubblewrap"},
            {"number": 4, "accepted": True, "code_hash": "0123456789ab", "sandbox": "bubblewrap", "banked": True},
        ],
    }
    data["capabilities"][-1] |= {"verdict": "not-trainable", "reasons": ["No environment could train it (broken tool)"]}
    return RoundFigures.model_validate(data)


def _rate(success: float, half: float = 0.09) -> dict:
    return {
        "success": success,
        "low": max(0.0, success - half),
        "high": min(1.0, success + half),
        "n": 240,
        "tasks": 60,
    }


def history_rows() -> list[dict]:
    """Two rounds on other data, a failed one, one that promoted, a blend, one that was refused, one that promoted."""
    new, old = "9b1e6b0c2d4f8a37", "77aa19c04be8d2f1"
    base = {"base": _rate(0.425)}
    return [
        {
            "round": 1, "round_id": "r1", "candidate": 1, "after": 1, "when": "2026-11-17T04:10:00+00:00",
            "data_hash": old, "state": "retired", "new": ["find_order"], "test": _rate(0.52), "base": _rate(0.38),
            "verdict": "promoted", "verdicts": {"find_order": "better"}, "seconds": 1804.0,
        },
        {
            "round": 2, "round_id": "r2", "when": "2026-11-18T02:11:00+00:00", "data_hash": old, "verdict": "failed",
            "reason": "EnvironmentFault: all 96 diagnosis episodes were lost to errors", "seconds": 12.0,
        },
        {
            "round": 3, "round_id": "r3", "candidate": 2, "after": 2, "when": "2026-11-19T04:02:00+00:00",
            "data_hash": new, "state": "retired", "new": ["set_delivery_address"], "renewed": ["find_order"],
            "test": _rate(0.55), **base, "verdict": "promoted", "seconds": 2011.0, "dollars": 1.25,
        },
        {
            "candidate": 3, "when": "2026-11-19T14:00:00+00:00", "data_hash": new, "state": "refused",
            "new": ["find_order-and-set"], "gone": ["find_order"], "verdict": "no round",
        },
        {
            "round": 4, "round_id": "r4", "candidate": 4, "after": 2, "when": "2026-11-20T04:20:00+00:00",
            "data_hash": new, "state": "refused", "new": ["cancel_order"], "test": _rate(0.55), **base,
            "verdict": "rejected-regression", "reason": "refund: fell by 11.7 points.", "seconds": 1750.0,
        },
        {
            "round": 5, "round_id": "r1-5f3a", "candidate": 5, "after": 5, "when": "2026-11-21T04:10:00+00:00",
            "data_hash": new, "state": "live", "new": ["cancel_order"], "renewed": ["set_delivery_address"],
            "test": _rate(0.6125), **base, "verdict": "promoted", "seconds": 1893.0,
        },
    ]  # fmt: skip


def later_round() -> RoundFigures:
    """A later round whose candidate became live."""
    data = full_round().model_dump(mode="json")
    data |= {
        "number": 5,
        "before": 2,
        "after": 5,
        "looks": 3,
        "ending": "trained",
        "live": _rate(0.55),
        "gain": {"points": 6.25, "low": 1.1, "high": 11.4, "p": 0.018, "mde": 7.2, "tasks": 60},
        "history": history_rows(),
        "release": {
            "number": 5,
            "verdict": "promoted",
            "reasons": ["As a whole: +7.1 points over 120 tasks (95 % interval +2.0 to +12.0), p = 0.0040."],
            "points": 7.1,
            "p": 0.004,
            "mde": 6.9,
            "new": ["cancel_order"],
            "renewed": ["set_delivery_address"],
            "kept": ["find_order"],
        },
    }
    for i, family in enumerate(data["families"].values()):
        family |= {"live": [0.9, 0.55, 0.7, 0.0][i], "live_interval": [0.4, 0.95]}
        del family["gained"]  # it is the difference of the rates
    data["capabilities"][0] |= {"alone": "better", "renewed": True, "ending": "solved", "chosen": 7}
    for i, step in enumerate(data["capabilities"][0]["steps"]):
        step["retention"] = 0.95 - 0.02 * i
    data["capabilities"][0]["steps"][3] |= {"reward": None, "success": None}
    data["router"] |= {"right": 0.951, "calibration": 41, "threshold": 0.62}
    return RoundFigures.model_validate(data)


def first_promoted() -> RoundFigures:
    """The first round, whose candidate became live."""
    data = later_round().model_dump(mode="json")
    data |= {"number": 1, "before": 0, "after": 1, "live": data["base"], "gain": data["difference"], "history": []}
    data["release"] |= {"number": 1, "new": ["set_delivery_address"], "renewed": [], "kept": []}
    return RoundFigures.model_validate(data)


def within_noise() -> RoundFigures:
    """Promoted on validation, and not told from noise on test."""
    gain = {"points": 2.5, "low": -3.0, "high": 8.0, "p": 0.41, "mde": 7.9, "tasks": 60}
    return RoundFigures.model_validate(later_round().model_dump(mode="json") | {"gain": gain})


def refused_round() -> RoundFigures:
    """A later round whose candidate was refused for what it cost elsewhere."""
    data = later_round().model_dump(mode="json")
    data |= {"number": 4, "after": 2, "routed": data["live"], "history": data["history"][:5]}
    data["gain"] |= {"points": 0.0, "p": 1.0, "low": -1.0, "high": 1.0}
    data["release"] |= {
        "number": 4,
        "verdict": "rejected-regression",
        "reasons": [
            "As a whole: +3.1 points over 120 tasks (95 % interval -0.5 to +6.7), p = 0.09: not significant.",
            "refund: fell by 11.7 points over 30 tasks (90 % interval -20.1 to -3.3, below zero).",
            "cancel: fell by 2.9 points, at most one of its 30 tasks: within its resolution.",
        ],
    }
    data["capabilities"][0] |= {"verdict": "refused"}
    return RoundFigures.model_validate(data)


def not_better_round() -> RoundFigures:
    """Adapters were trained, and none was better alone than what is live."""
    data = refused_round().model_dump(mode="json") | {"release": None}
    data["capabilities"][0] |= {"verdict": "underpowered", "alone": "underpowered"}
    return RoundFigures.model_validate(data)


def _without_adapters(ending: str, why: str) -> RoundFigures:
    data = refused_round().model_dump(mode="json")
    data |= {"release": None, "router": None, "capabilities": [], "ending": ending, "stopped": why}
    return RoundFigures.model_validate(data)


def nothing_lacking() -> RoundFigures:
    why = "Nothing is lacking that could be trained: release 2 solved all of it. The round ends early and well."
    return _without_adapters("nothing lacking", why)


def mastered_round() -> RoundFigures:
    return _without_adapters("mastered", "Mastered: release 2 solves the environments of what it seemed to lack.")


def untrained_round() -> RoundFigures:
    return _without_adapters("nothing trained", "No capability could be trained. Release 2 solved 3 of 96 episodes.")


def other_data() -> RoundFigures:
    """The first round on other data of the target."""
    data = later_round().model_dump(mode="json")
    data |= {"number": 3, "data_before": "77aa19c04be8d2f1", "history": data["history"][:3]}
    return RoundFigures.model_validate(data)


def with_generalist() -> RoundFigures:
    """A round that trained one adapter more, on everything: no rule selected it, and it answers what is unlike all."""
    data = full_round().model_dump(mode="json")
    last = {**data["capabilities"][0], "name": "generalist", "mean_cov": None, "mean_delta": None, "runs_passed": 0}
    data["capabilities"].insert(1, last)
    data["router"]["unlike"] = "generalist"
    data["router"] |= {"right": 0.9, "calibration": 40}
    return RoundFigures.model_validate(data)
