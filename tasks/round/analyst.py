"""The round's client of language models, the analyst and the simulated user behind it, from the round's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from db import Store
from environments.contract import Target
from environments.targets.third_party.adapter import model_of_user
from environments.targets.third_party.simulated_user import UserModel
from errors import ConfigurationError
from models.providers.analyst import AnalystSettings
from models.providers.analyst_store import StoredSpend
from models.providers.client import ModelClient
from models.providers.litellm_client import missing_keys, price_of
from models.providers.simulated_user import user_model
from models.providers.spending import OF_ROUND, SpendingCap
from settings import Settings
from tasks.round.traffic import target_named


def analyst_settings(settings: Settings) -> AnalystSettings:
    """The part of the settings that the client knows."""
    names = AnalystSettings.__dataclass_fields__
    return AnalystSettings(**{name: getattr(settings.analyst, name) for name in names})


def author_settings(settings: Settings) -> AnalystSettings:
    """The same of the model that writes environments: the analyst's, unless `synthesizer.model` names another."""
    how, own = analyst_settings(settings), settings.synthesizer
    if not own.model:
        return how
    return replace(
        how,
        model=own.model,
        api_base=own.api_base,
        api_key_variable=own.api_key_variable,
        prompt_price=own.prompt_price,
        sampled_price=own.sampled_price,
    )


def models_of(settings: Settings) -> list[tuple[str, AnalystSettings]]:
    """(part of the settings that names it, how it is reached) of each model that a round asks, each once."""
    judge = [("analyst", analyst_settings(settings))] if settings.analyst.kind == "llm" else []
    own = "synthesizer" if settings.synthesizer.model else "analyst"
    author = [(own, author_settings(settings))] if settings.synthesizer.kind == "llm" else []
    return list({how: (part, how) for part, how in [*judge, *author]}.values())


def analyst_prices(settings: Settings) -> tuple[float, float]:
    """Dollars per million prompt and sampled tokens of the model that most calls go to, the judge's where there is one;
    zeros where unknown (a cap in dollars is refused there)."""
    a = analyst_settings(settings) if settings.analyst.kind == "llm" else author_settings(settings)
    return a.price or price_of(a.model) or (0.0, 0.0)


def round_client(
    settings: Settings, store: Store, round_id: str | None, before: Callable[[], object] = bool
) -> ModelClient:
    """The client of a round: the caps of `analyst` hold for all of its calls, what the round spent before and spends in
    other processes is counted, and each call is stored in `spend`. Without a round it counts and stores what is spent
    outside of one. `before` is called before each call."""
    log = StoredSpend(store, round_id)
    return ModelClient(SpendingCap(analyst_settings(settings).limits, None, OF_ROUND, log.elsewhere), log, before)


def target_of(settings: Settings, store: Store, client: ModelClient) -> Target:
    """The round's target; a user played by a model plays through `client`."""
    return target_named(settings.target, store, settings.target_user, _user_model(settings, client))


def check_user(settings: Settings, target: Target) -> None:
    """Refuse a simulated user that has no key, or no price that the round's cap could be held with:
    `ConfigurationError`."""
    model = model_of_user(str(getattr(target, "user", "")))
    if not model:
        return
    if missing := missing_keys(model):
        raise ConfigurationError(f"simulated user {model!r} needs {', '.join(missing)}; set it in the environment")
    if settings.analyst.max_dollars and _price_of_user(settings, model) is None:
        raise ConfigurationError(
            f"the price of the simulated user {model!r} is unknown: a cap of {settings.analyst.max_dollars:g} dollars "
            "cannot hold; use a model that LiteLLM has a price for, or the caps max_calls and max_total_tokens instead"
        )


def _user_model(settings: Settings, client: ModelClient) -> UserModel | None:
    user, a = settings.target_user, settings.analyst
    return user_model(user, client, given_price(settings, model_of_user(user)), a.concurrency, a.send_temperature)


def given_price(settings: Settings, model: str) -> tuple[float, float] | None:
    """The analyst's own price where the same model plays the user."""
    return analyst_settings(settings).price if model == settings.analyst.model else None


def _price_of_user(settings: Settings, model: str) -> tuple[float, float] | None:
    return given_price(settings, model) or price_of(model)
