"""What has to hold before a round that asks a language model may start: one clear error for each thing that is wrong.

Without a model configured in `analyst` nothing here does anything. With one, a probe of a few tokens shows that model,
address, key and structured output work; a round that starts at night must not find that out after its rollouts.
"""

from __future__ import annotations

import logging
import math
import os
from contextlib import closing

from pydantic import BaseModel

from db import ReplyRow, Store, open_store
from db.rows.conversations import TRAFFIC
from environments.contract import SPLITS, Target
from environments.sandbox.workers import choose_level
from environments.targets.catalogue import check_target_name
from environments.task_ids import checked_tasks
from environments.validation.apart import repeated
from errors import ConfigurationError, ProviderError
from models.local.model_files import EMBEDDED, check_base_config, check_base_files
from models.objects import files_of
from models.providers.analyst import Analyst, AnalystSettings, Question
from models.providers.spending import most_tokens
from settings import Settings, writable_folder
from settings_parts import shown_variable
from tasks.releases.lookup import check_live_base
from tasks.round.analyst import analyst_prices, check_user, models_of, round_client, target_of
from tasks.round.policies import check_policy
from tasks.round.target_prompt import context_text
from tasks.round.traffic import NOTHING_SAID
from tasks.round.traffic import STAGES as FINDING
from tasks.targets.looks import look_over
from tasks.unattended.notices import check_webhook
from tasks.unattended.servers import check_servers

logger = logging.getLogger("trace")

# No tokenizer packs more characters of such text into a token: what a prompt costs at the very least.
CHARACTERS_PER_TOKEN = 8
# Settings with which a probe succeeded in this process. A command checks twice (`preflight`, then `open_context`) and a
# worker starts many flow runs, while a probe costs a paid call: it proves something about model, address and key, which
# are the same for all of them. Only settings are remembered, nothing of a round, and a probe that failed is repeated.
_PROBED: set[AnalystSettings] = set()


class Ready(BaseModel):
    """What the probe asks for."""

    ready: bool


def check_analyst(settings: Settings, target: Target, store: Store) -> None:
    """Raise `ConfigurationError` (or `SandboxError`, `ProviderError`) when a round with these settings cannot end."""
    if not settings.asks_a_model:
        return
    _check_settings(settings)
    _check_caps(settings, target)
    _probe(settings, store)


def _check_settings(settings: Settings) -> None:
    """What the settings alone show: a model, its key, a sandbox for what it writes."""
    own = settings.synthesizer
    if own.kind == "llm" and not own.model:
        of_another = "api_base", "api_key_variable", "prompt_price", "sampled_price"
        if given := [f"synthesizer.{name}" for name in of_another if getattr(own, name) not in ("", None)]:
            raise ConfigurationError(
                f"{', '.join(given)} given, and synthesizer.model is not: the analyst's model writes, and is asked as "
                "analyst.* say; name the model that writes as synthesizer.model, though it be the same, or leave them "
                "out"
            )
    for part, how in models_of(settings):
        check_model(settings, part, how)
    if own.kind == "llm":
        choose_level(settings.sandbox)


def check_model(settings: Settings, part: str, how: AnalystSettings) -> None:
    """Raise `ConfigurationError` where a part of the settings that asks a model names none, its key is not there, or it
    has one price of two, which would be left aside without a word."""
    if not how.model:
        stage = "analyst.kind" if settings.analyst.kind == "llm" else "synthesizer.kind"
        raise ConfigurationError(
            f"{stage} is 'llm' and no model is configured; set analyst.model (TRACE_ANALYST__MODEL, LiteLLM's name "
            "of one), or use 'checks' and 'generators', which need none"
        )
    if how.api_key_variable and not os.environ.get(how.api_key_variable):
        raise ConfigurationError(
            f"{part}.api_key_variable names the environment variable "
            f"{shown_variable(how.api_key_variable)}, which is empty; "
            "put the key there, or name another"
        )
    if (how.prompt_price is None) != (how.sampled_price is None):
        given, missing = ("sampled", "prompt") if how.prompt_price is None else ("prompt", "sampled")
        raise ConfigurationError(
            f"{part}.{given}_price is given and {part}.{missing}_price is not; give both, in dollars per million "
            "tokens, or neither, and LiteLLM's table decides"
        )


def least_calls(settings: Settings, target: Target) -> int:
    """The fewest calls that the stages of a round can need: discovery and every labelling run, or one module."""
    calls = 0
    if settings.analyst.kind == "llm":
        tasks = len(target.tasks("diagnosis"))
        trajectories = min(tasks, settings.rollout.tasks or tasks) * settings.rollout.trials
        calls += 1 + settings.selection.runs * math.ceil(trajectories / settings.analyst.batch)
    return calls + (settings.synthesizer.kind == "llm")


def _check_caps(settings: Settings, target: Target) -> None:
    a = settings.analyst
    calls = least_calls(settings, target)
    if a.max_calls and a.max_calls < calls:
        raise ConfigurationError(
            f"analyst.max_calls = {a.max_calls}, and a round needs {calls} at least; raise it, or lower selection.runs"
        )
    if not (a.max_total_tokens or a.max_dollars):
        return
    text = context_text(target)
    one_call = most_tokens(text) + a.max_tokens
    tokens = max(one_call, calls * (len(text) // CHARACTERS_PER_TOKEN))
    if a.max_total_tokens and a.max_total_tokens < tokens:
        raise ConfigurationError(
            f"analyst.max_total_tokens = {a.max_total_tokens}, and a round needs {tokens} at least ({calls} calls, "
            f"each with the target's policy and tools, and room for one reply of {a.max_tokens}); raise it, or lower "
            "selection.runs or analyst.max_tokens"
        )
    prices = analyst_prices(settings)
    dollars = calls * (len(text) // CHARACTERS_PER_TOKEN) * prices[0] / 1e6
    if a.max_dollars and a.max_dollars < dollars:
        raise ConfigurationError(
            f"analyst.max_dollars = {a.max_dollars:g}, and a round needs {dollars:.4g} at least ({calls} calls at "
            f"{prices[0]:g} dollars per million tokens); raise it, or lower selection.runs"
        )


class _NoReplies:
    """A cache without memory: a probe that is answered from a cache proves nothing."""

    def get(self, request_hash: str) -> ReplyRow | None:
        return None

    def put(self, row: ReplyRow) -> None:
        return None


def _probe(settings: Settings, store: Store) -> None:
    """Ask each model for one small object in the schema, once a process."""
    for part, how in models_of(settings):
        if how not in _PROBED:
            _probe_one(settings, store, part, how)
            _PROBED.add(how)


def _probe_one(settings: Settings, store: Store, part: str, probed: AnalystSettings) -> None:
    asked = "This is a test of the connection. Answer with ready set to true."
    try:
        with closing(round_client(settings, store, None)) as outside:
            analyst = Analyst(probed, outside, _NoReplies())
            analyst.ask(Question("probe", [{"role": "user", "content": asked}], Ready))
    except ProviderError as problem:
        if problem.transient or problem.unpaid:
            raise
        raise ConfigurationError(
            f"{probed.model} does not answer in a schema ({problem}); set analyst.structured to 'object' or 'text', "
            "change analyst.max_tokens, switch analyst.send_temperature off for a model that takes none, or choose "
            f"another model as {part}.model"
        ) from problem


def preflight(settings: Settings) -> None:
    """Everything that can be wrong before a round starts: folder, target, store, base model. One clear error each."""
    check_without_loading(settings)
    check_live(settings)
    check_by_loading(settings)


def check_live(settings: Settings) -> None:
    """Raise `ConfigurationError` where what is live of the home stands on another base model. Only what goes on from it
    asks: a comparison has homes of its own."""
    with open_store(settings.database_url) as store:
        check_live_base(store, settings.target, settings.base_model)


def check_without_loading(settings: Settings) -> None:
    """The first part of `preflight`: what needs no heavy library. A usual mistake is refused within a second or two.

    The target's name is known, trainings at once are not in each other's way, the home can be written, the store
    answers, the servers of Prefect and MLflow that are named are there, the base model's files are whole, vLLM servers
    are as needed, and a language model is configured where one is asked.
    """
    if settings.target != TRAFFIC:
        check_target_name(settings.target)
    check_trainings(settings)
    writable_folder(settings.folder)
    files_of(settings).check()
    open_store(settings.database_url).close()
    check_servers(settings)
    check_base_files(settings.base_model, settings.cache)
    check_policy(settings)
    check_webhook(settings)
    check_approval(settings)
    if settings.asks_a_model:
        _check_settings(settings)


def check_trainings(settings: Settings) -> None:
    """Raise `ConfigurationError` where several trainings at once would wait for one another, or be in their way."""
    many = settings.devices.trainings
    if many == 1:
        return
    said = f"devices.trainings = {many}, and "
    if settings.train.carries:
        t = settings.train
        raise ConfigurationError(
            f"{said}with train.carry = {str(t.carry).lower()}, train.demonstrations = {t.demonstrations} and "
            f"train.shown = {t.shown} a training begins from the round's earlier ones, so that they come one after "
            "another; set devices.trainings = 1, or train.carry = false, train.demonstrations = 0 and train.shown = 0"
        )
    if settings.devices.sleep:
        raise ConfigurationError(
            f"{said}with devices.sleep = true the servers that sleep for one training answer no other; set "
            "devices.trainings = 1, or give the servers GPUs of their own and set devices.sleep = false"
        )
    if many > settings.selection.most:
        raise ConfigurationError(
            f"{said}a round trains selection.most = {settings.selection.most} capabilities at most; lower the one or "
            "raise the other"
        )


def check_approval(settings: Settings) -> None:
    """Raise `ConfigurationError` for a round that is to ask a person where nobody can answer."""
    if not settings.unattended.approve:
        return
    from prefect.settings import get_current_settings

    if not get_current_settings().api.url:
        raise ConfigurationError(
            "unattended.approve asks in Prefect's UI, and no Prefect server is named; set PREFECT_API_URL (see "
            "'trace-agent up'), or switch it off"
        )


def check_tasks(target: Target, until: str = "") -> None:
    """Refuse a target with tasks that `checked_tasks` refuses (`TargetError`), that a round cannot learn from, or that
    lacks the tasks by which it is proven and reported (`ConfigurationError`). A round `until` a stage that plays
    neither needs diagnosis tasks alone."""
    lacking = {
        "diagnosis": "a round has nothing to learn from; it can be evaluated (trace-agent evaluate), or take another "
        "target",
        "validation": "nothing that a round trains could be proven; give it some, or take another target",
        "test": "what a round makes live could not be reported; give it some, or take another target",
    }
    needed = SPLITS[:1] if target.name == TRAFFIC or until in FINDING else SPLITS
    tasks = checked_tasks(target)
    for split in needed:
        if tasks[split]:
            continue
        if target.name == TRAFFIC:
            raise ConfigurationError(f"{NOTHING_SAID}; POST /v1/feedback gives it (docs/6-serving.md)")
        counts = ", ".join(f"{name} {len(tasks[name])}" for name in SPLITS)
        raise ConfigurationError(f"target {target.name!r} has no {split} task ({counts}), so {lacking[split]}")
    if needed == SPLITS and (said := repeated(target)):
        logger.warning("%s (target %s): figures are of what was learnt by heart; give each task to one split",
                       said, target.name)  # fmt: skip


def check_by_loading(settings: Settings, until: str = "") -> None:
    """The second part of `preflight`: the target itself, the kinds of its checks and whether its episodes repeat, the
    base model's configuration and tokenizer, a language model's answer. Targets, LiteLLM and transformers take seconds
    to import. `until` is the last stage, where it is not the whole round."""
    with open_store(settings.database_url) as store, closing(round_client(settings, store, None)) as client:
        target = target_of(settings, store, client)
        check_tasks(target, until)
        if target.name != TRAFFIC:
            look_over(settings, target)
        check_base_config(settings.base_model)
        if settings.base_model != EMBEDDED:
            from models.local.base import load_renderer  # torch

            load_renderer(settings.base_model, settings.calls)
        check_user(settings, target)
        check_analyst(settings, target, store)
