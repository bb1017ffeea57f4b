"""Measuring a policy on a target outside a round: played, stored as it goes, resumed, and summed up with intervals.

An evaluation's id hashes what decides its figures: the target's data, split, trials, seed, simulated user, policy,
sampling and the number of the start. Its episodes are stored as trajectories under that id, so the same command goes on
with what is owed, whatever stopped it. An episode that the infrastructure lost is stored as an error with its boundary,
owed again, and in no denominator.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from db import AdapterRow, SpendRow, Store, row_id
from environments.contract import Target, TargetTask, content_hash
from environments.targets.third_party.adapter import MODEL_USER
from errors import ConfigurationError, EnvironmentFault, TargetError
from models.episodes import Episode
from models.opening import opened
from models.policy import TokenPolicy
from models.providers.litellm_client import missing_keys
from models.providers.spending import SpendingCap, Spent
from tasks.measuring.outcomes import evaluation_stage, release_marker
from tasks.measuring.policy_names import LoadedPolicy
from tasks.round.engine import Engine, Origin, Playground, PlayOptions
from tasks.round.registry import registry_name

EVALUATION = PlayOptions(
    tries=2,
    # What may go away by itself is played once more in the same run.
    passing=("provider", "environment", "sandbox"),
    # Further calls can only fail in the same way.
    fatal=("configuration", "budget"),
    # So many lost episodes one after another mean that the provider (or the environment) is down.
    lost_in_a_row=8,
)

# What the user of a target is called that has no simulated one.
NOBODY = "none"


@dataclass(frozen=True)
class EvaluationSpec:
    """What is measured. `limit` takes the first tasks of the split only and is no part of the id: a later run without
    it goes on with the others. `start` counts how often the evaluation was begun anew. `called` is the name that the
    target was asked for by, as rounds and releases are stored under it: one's own target may have another `name`."""

    target: Target
    called: str
    split: str
    trials: int = 1
    seed: int = 0
    limit: int | None = None
    start: int = 0

    @property
    def user(self) -> str:
        """Who plays the user; `NOBODY` where there is no choice."""
        return str(getattr(self.target, "user", None) or NOBODY)

    @property
    def tasks(self) -> list[TargetTask]:
        return list(self.target.tasks(self.split))[: self.limit]


@dataclass
class EvaluationRun:
    """One run of an evaluation: what was there, what was played, whether each episode has a result now, and why it
    stopped early and for which boundary ("" when it did not)."""

    id: str
    ids: list[str]
    resumed: int
    played: int = 0
    seconds: float = 0.0
    complete: bool = False
    stopped: str = ""
    stopped_by: str = ""
    answered_by: list[str] = field(default_factory=list)


def evaluation_id(spec: EvaluationSpec, loaded: LoadedPolicy) -> str:
    """Hash of everything that decides an evaluation's figures."""
    how = [spec.split, spec.trials, spec.seed, spec.user, loaded.sampling.temperature, loaded.sampling.max_tokens]
    return content_hash(["evaluation", spec.called, spec.target.data_hash, loaded.identity.id, *how, spec.start])


def latest(store: Store, spec: EvaluationSpec, loaded: LoadedPolicy, fresh: bool) -> EvaluationSpec:
    """The spec with the number of the newest start that is stored, or of the next one when `fresh`."""
    number = 0
    while store.rows(SpendRow, stage=evaluation_stage(evaluation_id(replace(spec, start=number), loaded))):
        number += 1
    return replace(spec, start=number if fresh or not number else number - 1)


def spent_before(store: Store, spec: EvaluationSpec, loaded: LoadedPolicy) -> float:
    """Dollars that earlier runs of the evaluation have spent."""
    return store.spent(None, stage=evaluation_stage(evaluation_id(spec, loaded)))["dollars"]


def run_evaluation(
    store: Store, spec: EvaluationSpec, loaded: LoadedPolicy, cap: SpendingCap, workers: int = 1
) -> EvaluationRun:
    """Play what is owed and store it as it ends; see `EvaluationRun`. Never raises because of an episode.

    `workers` episodes are played at once by a policy that is no token policy; with 0 nothing is played."""
    identity, began = evaluation_id(spec, loaded), time.monotonic()
    run_row = row_id(identity, time.time_ns())

    def put_spent() -> None:
        sums = cap.spent or {loaded.identity.base: Spent()}
        stage = evaluation_stage(identity)
        store.put([_spend_row(f"{run_row}-{i}", stage, m, s) for i, (m, s) in enumerate(sums.items())],
                  replace=True)  # fmt: skip

    put_spent()
    if loaded.release is not None:
        store.put([release_marker(identity, loaded.release)])
    sampling = loaded.sampling
    ground = Playground(
        spec.target.environment, spec.called, "evaluation", sampling.temperature, sampling.max_tokens,
        _adapter_row(store, loaded, spec.called), identity, scope=f"evaluation:{identity}",
    )  # fmt: skip
    engine = Engine(
        store, Origin(spec.called, spec.target.data_hash), loaded.policy, loaded.renderer, loaded.window,
        replace(EVALUATION, workers=workers, cap=cap, flushed=put_spent),
    )  # fmt: skip
    adapters = _acting(store, identity, loaded, tasks := spec.tasks)
    episodes = [Episode("", task, spec.seed, k, adapters[task.id]) for task in tasks for k in range(spec.trials)]
    played = engine.play(ground, episodes, f"{loaded.name.text} on {spec.called} {spec.split}")
    ids = list(dict.fromkeys(played.ids))
    run = EvaluationRun(
        identity, ids, played.resumed, played.played, stopped=played.stopped, stopped_by=played.stopped_by
    )
    run.complete = len(store.stored_ids(ids)) == len(ids)
    cap.settle()
    run.seconds = time.monotonic() - began
    run.answered_by = sorted(loaded.chat.answered_by) if loaded.chat else []
    return run


def _acting(store: Store, identity: str, loaded: LoadedPolicy, tasks: Sequence[TargetTask]) -> dict[str, str | None]:
    """The adapter of each task by its id: of a release the one that has played it in this evaluation, else the router's
    choice. A router may decide otherwise beside other tasks, and a task would be in the evaluation twice."""
    if loaded.choose is None:
        return {task.id: loaded.adapter for task in tasks}
    names = {loaded.policy.identity(name).id: name for name in (None, *loaded.adapters)}
    columns = ["task_id", "policy_id"]
    # By policies as well: they have an index, and groups have none.
    played = store.trajectory_frame(
        None, columns=columns, policy_id=list(names), group_id=identity, error_boundary=None
    )
    acted = {str(task): names[by] for task, by in played[columns].itertuples(index=False) if by in names}
    owed = [task for task in tasks if task.id not in acted]
    return acted | dict(zip((task.id for task in owed), loaded.choose(owed), strict=True))


def _adapter_row(store: Store, loaded: LoadedPolicy, target: str) -> str | None:
    """The adapter as the store knows it, of the target that is played, else the name that it is served under."""
    served = loaded.served or loaded.adapter or loaded.name.adapter
    if not served:
        return None
    capability, _, rest = served.partition("@v")
    if not (version := rest.partition("-")[0]):
        return served
    model = f"trace-{registry_name(target)}-{capability}"
    rows = store.rows(AdapterRow, registered_model=model, registered_version=version)
    return rows[0].id if len(rows) == 1 else served


def _spend_row(key: str, stage: str, model: str, sums: Spent) -> SpendRow:
    return SpendRow(id=key, stage=stage, model=model, **asdict(sums))


def check_user(spec: EvaluationSpec, cap: SpendingCap, price: tuple[float, float] | None = None) -> None:
    """Refuse a simulated user that has no key, or no price that a cap could be held with (`price` is the one that was
    given, in dollars per million prompt and sampled tokens): `ConfigurationError`."""
    if not spec.user.startswith(MODEL_USER):
        return
    model = spec.user.removeprefix(MODEL_USER)
    missing = missing_keys(model)
    if missing:
        raise ConfigurationError(f"simulated user {model!r} needs {', '.join(missing)}; set it in the environment")
    cap.require_price(model, price, "--user-price")


def check_context(spec: EvaluationSpec, loaded: LoadedPolicy) -> int:
    """Refuse a policy whose context no task's first prompt fits; how many of the tasks do not fit (their episodes are
    stored as errors of the policy before their first token). A token policy's prompts are rendered and counted; an API
    model's are estimated at four characters a token. Nothing is asked of a simulated user that is a model.
    """
    if loaded.context is None or spec.user.startswith(MODEL_USER):
        return 0
    needs = []
    for task in spec.tasks:
        with suppress(EnvironmentFault, TargetError):  # its episode will tell
            needs.append(_first_turn(spec, loaded, task) + loaded.sampling.max_tokens)
    too_long = [need for need in needs if need > loaded.context]
    if needs and len(too_long) == len(needs):
        raise ConfigurationError(
            f"{loaded.name.text} has a context of {loaded.context} tokens; the first turn of {spec.called} needs "
            f"{min(needs)} to {max(needs)}; take a model with a longer context, or lower --max-tokens"
        )
    return len(too_long)


def _first_turn(spec: EvaluationSpec, loaded: LoadedPolicy, task: TargetTask) -> int:
    """Tokens of a task's first prompt, counted or estimated."""
    prompt, first = opened(spec.target.environment, task)
    if isinstance(loaded.policy, TokenPolicy) and loaded.renderer is not None:
        return len(loaded.renderer.start(prompt, first).ids)
    texts = [prompt.instructions, *(m.content for m in (*prompt.examples, *first))]
    return (sum(map(len, texts)) + len(json.dumps([dict(t) for t in prompt.tools]))) // 4
