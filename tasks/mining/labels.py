"""The three labels of a trajectory for a capability."""

from __future__ import annotations

NA = "NA"


PRESENT = "PRESENT"


LACKING = "LACKING"


LABELS = (NA, PRESENT, LACKING)
