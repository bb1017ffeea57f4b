"""What the gate says, with every figure behind it; `as_json` gives a verdict for a JSON column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from tasks.measuring.falls import Fall
from tasks.measuring.statistics import PairedDifference


class GateVerdict(StrEnum):
    """What the gate says of an adapter or a release. `better` is an adapter that passed phase A and waits for B;
    `declined` a release that the rules would promote and that a person who was asked did not want, or that could not
    follow what was made live meanwhile."""

    PROMOTED = "promoted"
    BETTER = "better"
    NOT_BETTER = "rejected-not-better"
    REGRESSION = "rejected-regression"
    UNDERPOWERED = "underpowered"
    DECLINED = "declined"


@dataclass(frozen=True)
class CapabilityDecision:
    """Phase A's verdict on one capability's adapter, with every figure behind it.

    `difference` is over its own families and `adjusted_p` its p-value after Holm over the `tried`; `mde` in points, at
    the level that Holm grants for certain (alpha / tried). None, all three, where no task of its families could be
    measured; `tried` counts those that could."""

    capability: str
    verdict: GateVerdict
    reasons: tuple[str, ...]
    difference: PairedDifference | None
    adjusted_p: float | None
    mde: float | None
    alpha: float
    look: int
    tried: int

    @property
    def passed(self) -> bool:
        return self.verdict is GateVerdict.BETTER

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ReleaseDecision:
    """Phase B's verdict on the assembled candidate, with every figure behind it.

    `difference` is over the split (None, like `mde`, where both sides finished no task of it in common), `own` over the
    own families of what passed (None without any), `capabilities` the same one by one, `elsewhere` over all other
    families of the split (None without any), `families` over each family; `own`, `capabilities` and `families` with the
    further tasks that were drawn for them. `pass_k` is the difference of pass^k with k = `trials` (None when no task
    had that many finished trials on both sides). All of these have 95 % intervals. `falls` says of each family how it
    reads as a fall, by its own interval (`GateRules.fall_confidence`), `wholes` the same of "overall", "all other
    families together" and "pass^k". `kept` is whether the gain on the own families is significant. `mde` is that of
    `difference`, in points, at `alpha`."""

    verdict: GateVerdict
    reasons: tuple[str, ...]
    difference: PairedDifference | None
    own: PairedDifference | None
    capabilities: Mapping[str, PairedDifference]
    elsewhere: PairedDifference | None
    families: Mapping[str, PairedDifference]
    falls: Mapping[str, Fall]
    wholes: Mapping[str, Fall]
    kept: bool
    pass_k: PairedDifference | None
    trials: int
    mde: float | None
    alpha: float
    look: int

    @property
    def promoted(self) -> bool:
        return self.verdict is GateVerdict.PROMOTED

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
