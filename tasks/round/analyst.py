"""The analyst's client settings and prices, from the round's settings."""

from __future__ import annotations

from models.providers.analyst import AnalystSettings
from settings import Settings


def analyst_settings(settings: Settings) -> AnalystSettings:
    """The part of the settings that the client knows."""
    names = AnalystSettings.__dataclass_fields__
    return AnalystSettings(**{name: getattr(settings.analyst, name) for name in names})


def analyst_prices(settings: Settings) -> tuple[float, float]:
    """Dollars per million prompt and sampled tokens; zeros where unknown (a cap in dollars is refused there)."""
    from models.providers.litellm_client import price_of

    a = settings.analyst
    return price_of(a.model, a.prompt_price, a.sampled_price) or (0.0, 0.0)
