"""What every stage works with: settings, store, target, base model and registry of one round, opened once a process."""

from __future__ import annotations

import logging
import platform
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from db import AdapterRow, GatePlanRow, ReleaseRow, Round, RoundState, Stage, Store
from db.rows.conversations import TRAFFIC
from environments.contract import Environment, Target, TargetTask
from errors import ConfigurationError, StageHeld, StoreError, TargetError
from models.adapters.registry import Registry
from models.adapters.releases import answering
from models.local.base import BaseModel, load_base
from models.objects import HomeFiles, files_of
from models.policy import MessagePolicy, TokenPolicy, TrainablePolicy
from models.providers.analyst import Analyst
from models.providers.analyst_store import StoredReplies
from models.providers.client import ModelClient
from models.renderer import Conversation
from models.telemetry import tracing
from settings import Settings
from tasks.releases.lifecycle import live_release, release_numbered
from tasks.round.analyst import analyst_settings, author_settings, round_client, target_of
from tasks.round.drawing import RoundTasks
from tasks.round.engine import Engine, Origin, Playground
from tasks.round.policies import Backend, check_adapters, open_backend
from tasks.round.registry import end_runs, open_registry, round_key, run_name, set_aside
from tasks.round.results import StageResult
from tasks.round.rollouts import WITHIN_BUDGET, EpisodeBudget, RoundEngine, Sharing, round_seed
from tasks.round.stored import StoredRound
from tasks.round.target_prompt import first_opening
from tasks.unattended.limits import RoundLimits
from tasks.unattended.progress import Stopwatch
from tasks.unattended.stalls import pulse


class Closable(Protocol):
    """What has to be closed."""

    def close(self) -> object: ...


C = TypeVar("C", bound=Closable)
R = TypeVar("R", bound=StageResult)
logger = logging.getLogger("trace")


@dataclass
class Context:
    """One open round. `model` and `environment` add up what this process spent in each; what is left of a round's
    wall time is orchestration. `budget` pays for the episodes where methods are compared; None: nobody counts them.
    `sharing` lets other processes play with this one; None: it plays alone. `declined` is why a person who was asked
    does not want the candidate promoted ("": it may be), and `answered` the candidate's id ("": nobody was asked, or
    answered). `adopted`: another process has opened the round, this one does
    a part of it. `left`: it goes on with a round that its last process left as running, without a word. `claimed` is
    the stage that this process works on; None between stages."""

    settings: Settings
    store: Store
    round: Round
    model: Stopwatch = field(default_factory=Stopwatch)
    environment: Stopwatch = field(default_factory=Stopwatch)
    budget: EpisodeBudget | None = None
    sharing: Sharing | None = None
    declined: str = ""
    answered: str = ""
    adopted: bool = False
    left: bool = False
    claimed: Stage | None = None
    _kept: dict[str, Any] = field(default_factory=dict)
    _closing: ExitStack = field(default_factory=ExitStack)

    @property
    def stored(self) -> StoredRound:
        """What the store holds of the round."""
        return StoredRound(self.store, self.round)

    @property
    def seed(self) -> int:
        """What decides the round's draws: the seed of the settings and the round's number."""
        return round_seed(self.settings.seed, self.round.number)

    @contextmanager
    def working_on(self, claimed: Stage) -> Iterator[None]:
        """Know the stage that this process has claimed, while it works on it."""
        self.claimed, before = claimed, self.claimed
        try:
            yield
        finally:
            self.claimed = before

    def still_ours(self) -> None:
        """Raise `StageHeld` where the stage that this process works on is no longer its own. A process that was
        suspended for longer than its lease must not replace what another has made meanwhile. Else the lease is whole
        again. Nothing happens between stages."""
        if self.claimed is not None and (self.claimed.lost.is_set() or not self.claimed.heartbeat()):
            raise StageHeld(
                f"stage {self.claimed.name!r} was taken over by {self.claimed.row().owner} while this process was "
                "suspended or did not reach the database; it stops here, and the round goes on there"
            )

    @cached_property
    def limits(self) -> RoundLimits:
        """What the round may take. It counts hours from here on, so it is made when the round is opened."""
        return RoundLimits(self.settings.limits, self.store, self.round, self.folder)

    @cached_property
    def parent(self) -> ReleaseRow | None:
        """The release that was live when the round began; None: the bare base."""
        parent = self.round.parent_id
        return None if parent is None else self.store.row(ReleaseRow, id=parent)

    @property
    def incumbent(self) -> ReleaseRow | None:
        """What a candidate has to beat: the parent, or, where the round begins a new lineage, the release that still
        answers. The gate's plan holds it, so that it stays the same once the candidate is live."""
        target = self.round.target
        plan = self.store.row(GatePlanRow, round_id=self.round.id)
        if plan is None:
            return self.parent or live_release(self.store, target)
        number = int(plan.rules["against"])
        return release_numbered(self.store, target, number) if number else None

    @cached_property
    def target(self) -> Target:
        found = target_of(self.settings, self.store, self.client)
        self._refuse_other_data(found)
        return found

    def same_data(self) -> None:
        """Raise `TargetError` where the target's data, once it is loaded, are no longer those that the round began
        with: what is played on them would be stored as played on the others."""
        if "target" in self.__dict__:
            self._refuse_other_data(self.target)

    def _refuse_other_data(self, target: Target) -> None:
        began, now = self.round.data_hash, target.data_hash
        if now != began and self.round.target != TRAFFIC:  # users go on talking; a round keeps what it began with
            raise TargetError(
                f"the data of {self.round.target} changed from {began} to {now} since round {self.round.number} began, "
                f"or are others on {platform.node()}; the next round begins with the new ones, or put the old ones back"
            )

    @cached_property
    def base(self) -> BaseModel:
        """The base model. Raises `ConfigurationError` where it is no longer what the round has trained adapters on."""
        s = self.settings
        loaded = load_base(s.base_model, s.dtype, s.calls, s.rollout.rows, s.cache, s.devices.shard)
        now = loaded.identity
        for row in self.store.rows(AdapterRow, round_id=self.round.id):
            if (row.base, row.base_revision) != (now.base, now.revision):
                raise ConfigurationError(
                    f"the base changed from {row.base}@{row.base_revision} to {now.base}@{now.revision} since round "
                    f"{self.round.number} began, and its adapters fit the first alone: put that one back, or begin "
                    "another round with --fresh"
                )
        return loaded

    @cached_property
    def backend(self) -> Backend:
        """The policy that samples, and who samples in training; closed with the round."""
        opened = open_backend(self.settings, self.base)
        self._closing.callback(opened.policy.close)
        check_adapters(self.settings, self.base, opened)
        if self.settings.devices.shard:  # what needs the whole base is proven
            from models.training.ranks import part_in_job

            part_in_job(self.base)
        return opened

    @property
    def policy(self) -> TrainablePolicy:
        """What samples; `base.policy` is always the model in this process (training, embedding, routing). In the job
        of a training with `devices.shard` its weights are in parts from here on, and it is trained alone."""
        return self.backend.policy

    @property
    def engine(self) -> RoundEngine:
        """Plays the round's own policy."""
        return self.engine_of(self.policy)

    def engine_of(self, policy: TokenPolicy | MessagePolicy) -> RoundEngine:
        """Plays a policy in the round."""
        renderer = self.base.renderer if isinstance(policy, TokenPolicy) else None
        rows = self.settings.open_episodes
        options = replace(WITHIN_BUDGET, flushed=self.limits.look)
        engine = Engine(self.store, self.origin, policy, renderer, rows, options)
        return RoundEngine(engine, self.model, self.environment, self.budget, self.limits, self.sharing)

    @property
    def origin(self) -> Origin:
        """Where the round's trajectories come from."""
        return Origin(self.round.target, self.round.data_hash, self.round.id)

    def ground(self, purpose: str) -> Playground:
        """The target's own environment at the evaluation temperature. A target behind another prompt than its own has
        a `prompt_id`: its episodes are others, and a process that knows the target by name cannot play them."""
        rollout = self.settings.rollout
        how = rollout.temperature, rollout.max_tokens
        ground = Playground(self.target.environment, self.round.target, purpose, *how, of_target=True)
        prompt = getattr(self.target, "prompt_id", "")
        return replace(ground, scope=f"{ground.where}|behind:{prompt}", of_target=False) if prompt else ground

    def training_ground(self, name: str, make: Callable[[], Environment], adapter_id: str) -> Playground:
        """A training environment at the evaluation temperature, for episodes that measure an adapter."""
        of_target = self.ground("evaluation")
        return replace(of_target, make=make, environment=name, adapter_id=adapter_id, scope="", of_target=False)

    @cached_property
    def probe(self) -> Conversation:
        """How the target's first task opens, as the policy reads it: where a new adapter must show that it is live."""
        return self.base.renderer.start(*first_opening(self.target))

    @cached_property
    def registry(self) -> Registry:
        return open_registry(self.settings, self.settings.target)

    @cached_property
    def span(self) -> Any:
        """The span of this process's part in the round, under which those of its stages lie; ended with it."""
        this = self.round
        about = {"trace.round": this.number or 0, "trace.target": this.target, "trace.profile": this.profile}
        span = tracing.begin(run_name(this.target, this.number), about)
        self._closing.callback(span.end)
        return span

    @cached_property
    def run(self) -> str:
        """MLflow's run of the round, begun or resumed; those of its stages are nested under it. It is ended with this
        process's part in the round, as what the round is then."""
        this = self.round
        set_aside(self.registry, self.store, this)
        tags = {"round": this.id, "kind": "round", "number": str(this.number), "target": this.target}
        run = self.registry.start_run(round_key(this.id), tags, run_name(this.target, this.number))
        self._closing.callback(self._end_run, run)
        return run

    def part_run(self, key: str, part: str, **tags: str) -> str:
        """The run of a part of the round, begun or resumed, under the round's own."""
        this = self.round
        tags = {"round": this.id, **tags}
        return self.registry.start_run(key, tags, run_name(this.target, this.number, part), self.run)

    def _end_run(self, run: str) -> None:
        state = self.store.round(self.round.id).state
        if self.adopted or state == RoundState.RUNNING:  # whoever opened the round, or goes on with it, ends its run
            return
        try:
            with answering(self.registry, "how the round ended"):
                self.registry.end_run(run, failed=state == RoundState.FAILED, stopped=state != RoundState.DONE)
                if state != RoundState.DONE:  # a training that was broken off has a run of its own
                    end_runs(self.registry, self.round.id, state)
        except StoreError as problem:  # the round itself is stored
            logger.warning("%s", problem)

    @cached_property
    def drawing(self) -> RoundTasks:
        """The round's tasks, its own draws among them."""
        return RoundTasks(self.store, self.round, self.target, self.settings.seed, self.settings.rollout.tasks)

    def tasks(self, split: str) -> list[TargetTask]:
        """The split's tasks that this round plays."""
        return self.drawing.played(split)

    @property
    def folder(self) -> Path:
        """Where the round's own files lie."""
        return self.settings.folder / self.round.id

    @cached_property
    def files(self) -> HomeFiles:
        """The home's files, and where they are put for others."""
        return files_of(self.settings)

    @property
    def analyst(self) -> Analyst:
        """The round's client of the language model that labels and judges."""
        how = analyst_settings(self.settings)
        return self.keep("analyst", lambda: Analyst(how, self.client, StoredReplies(self.store), pulse))

    @property
    def author(self) -> Analyst:
        """The round's client of the language model that writes environments."""
        how = author_settings(self.settings)
        return self.keep("author", lambda: Analyst(how, self.client, StoredReplies(self.store)))

    @property
    def client(self) -> ModelClient:
        """The round's one client of language models: analyst, author and simulated users share its spending cap, and
        are held to the round's limits, however long a stage asks and plays nothing."""
        return self.keep("client", lambda: round_client(self.settings, self.store, self.round.id, self.limits.look))

    def spent(self) -> dict[str, float]:
        """Calls, tokens, dollars and seconds that the round's language models have cost, simulated users included."""
        return self.stored.spent()

    def keep(self, name: str, make: Callable[[], C]) -> C:
        """What `make` gives: made once, and closed when this process drops the round."""
        if name not in self._kept:
            made = make()
            self._closing.callback(made.close)
            self._kept[name] = made
        kept: C = self._kept[name]
        return kept

    def rest(self) -> None:
        """Free the memory that sampling has taken in this process, while other processes train. It is taken again when
        it is needed; the base model stays loaded."""
        if "base" in self.__dict__:  # what is not loaded holds nothing
            self.base.policy.free_buffers()

    def close(self) -> None:
        """Close what the round keeps open; take its adapters from the servers."""
        self._closing.close()

    def found(self, kind: type[R], *of: str) -> R | None:
        """The stored result of a stage (of a capability), or None while it is not done (see `StoredRound`)."""
        return self.stored.found(kind, *of)

    def result(self, kind: type[R], *of: str) -> R:
        """The stored result of a stage. Raises `StoreError` while the stage is not done."""
        return self.stored.result(kind, *of)


def peak_gib() -> float:
    """Peak memory of this process in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
