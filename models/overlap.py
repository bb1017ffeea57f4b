"""Playing episodes on a token policy: environments are called in threads while turns are sampled.

What comes when decides no draw: a turn's seed follows from its episode and step (`Player.request`). It decides what is
in a batch together, and with that the last bits of the figures. So a policy in this process waits for quick
environments, however busy the machine is, and its batches are the same whenever they are played.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

from environments.contract import Observation, Termination
from errors import TraceError
from models.lanes import Lanes
from models.policy import Cancelling, Generation, TokenPolicy, Waking
from models.renderer import Renderer

if TYPE_CHECKING:
    from models.episodes import Episode, Player, Playing, Trajectory

# A policy that computes in this process has its batch filled before it is polled: environments are waited for as long
# as one answers within so many seconds of another. Those whose calls mostly take less than QUICK_SECONDS are all waited
# for, also on a busy machine on which one is late; slow ones, such as a user played by a model, hold nothing up.
GATHER_SECONDS, STRAGGLER_SECONDS, QUICK_SECONDS = 0.01, 5.0, 0.05
# So many calls say whether an environment is quick.
RECENT = 31


class Overlap:
    """One call of `Player.play`. Everything here happens in the caller's thread, but the environments."""

    def __init__(self, player: Player, policy: TokenPolicy, renderer: Renderer) -> None:
        self.player, self.policy, self.renderer = player, policy, renderer
        self.open: dict[str, Playing | None] = {}
        self.begun: dict[str, Playing] = {}  # by their lanes' threads
        self.sampling: set[str] = set()  # whose turn is in flight
        self.waking = isinstance(policy, Waking)
        self.lasted: deque[float] = deque(maxlen=RECENT)
        self.lanes = Lanes(player.window, policy.wake if isinstance(policy, Waking) else bool)

    def play(self, episodes: Iterator[Episode]) -> Iterator[Trajectory]:
        """Trajectories in the order in which episodes end."""
        try:
            while True:
                for episode in islice(episodes, self.player.window - len(self.open)):
                    self.open[episode.key] = None
                    self.lanes.start(episode.key, partial(self._begin, episode), partial(self._begun, episode))
                if not self.open:
                    return
                yield from self._heard()
                if self.sampling:
                    self._sample()
        finally:
            for key in self.open:  # given up: each lane closes its environments behind the call that it is in
                self.lanes.start(key, partial(self._give_up, key), bool)
            self.lanes.close()
            if isinstance(self.policy, Cancelling):  # where playing is given up early, others go on with the policy
                for key in self.sampling:
                    self.policy.cancel(key)

    def _heard(self) -> Iterator[Trajectory]:
        """Go on with the episodes whose environments have answered; those that are over."""
        since = time.perf_counter()
        if self.waking:
            answered = self.lanes.take(0.0 if self.sampling else None)
        else:
            patience = self._patience()
            answered = self.lanes.take(patience if self.sampling else None, patience)
        self.lasted.extend(done.seconds for done in answered)
        self.player.environment_seconds += time.perf_counter() - since
        for done in answered:
            ended = done.then(done.result)
            if ended is not None:
                yield ended

    def _patience(self) -> float:
        """Seconds for which a further answer is waited for."""
        return STRAGGLER_SECONDS if median(self.lasted or (0.0,)) < QUICK_SECONDS else GATHER_SECONDS

    def _sample(self) -> None:
        """Wait for sampled turns, and hand them to their environments. A policy that can be woken returns early, with
        none, when an environment has answered in between."""
        since = time.perf_counter()
        generations = self.policy.poll()
        self.player.policy_seconds += time.perf_counter() - since
        for generation in generations:
            self.sampling.discard(generation.session)
            self._turn(generation)

    def _call(self, playing: Playing, call: Callable[[], Any], then: Callable[..., Trajectory | None]) -> None:
        self.lanes.start(playing.episode.key, call, partial(then, playing))

    def _submit(self, playing: Playing) -> None:
        self.policy.submit(self.player.request(playing))
        self.sampling.add(playing.episode.key)

    def _end(self, playing: Playing, termination: Termination, problem: TraceError | None = None) -> None:
        self._call(playing, partial(self.player.end, playing, termination, problem), self._ended)

    def _begin(self, episode: Episode) -> tuple[Playing, Observation]:
        playing, first = self.player.begin(episode)
        self.begun[episode.key] = playing
        return playing, first

    def _give_up(self, key: str) -> None:
        if key in self.begun:
            self.player.close(self.begun[key])

    def _begun(self, episode: Episode, result: Callable[[], Any]) -> Trajectory | None:
        try:
            playing, first = result()
        except TraceError as problem:
            self._forget(episode.key)
            return self.player.failed(episode, problem)
        self.open[episode.key] = playing
        try:
            playing.conversation = self.renderer.start(playing.prompt, first.messages)
            self._submit(playing)
        except TraceError as problem:
            self._end(playing, Termination.ERROR, problem)
        return None

    def _turn(self, generation: Generation) -> None:
        """Carry one sampled turn into the environment."""
        playing = self.open[generation.session]
        assert playing is not None  # only an episode that has begun has turns
        try:
            if generation.problem is not None:
                raise generation.problem
            action = self.renderer.read(generation.ids, playing.tools, playing.conversation.before)
        except TraceError as problem:
            self._end(playing, Termination.ERROR, problem)
            return
        step = partial(self.player.step, playing, action, len(generation.ids))
        self._call(playing, step, partial(self._stepped, generation))

    def _stepped(self, generation: Generation, playing: Playing, result: Callable[[], Any]) -> None:
        try:
            observation = result()
            self.player.count_step()
            last = observation.done or len(playing.steps) >= playing.max_steps
            self.renderer.answer(
                playing.conversation, generation.ids, generation.logprobs, () if last else observation.messages
            )
            if last:
                self._end(playing, Termination.DONE if observation.done else Termination.MAX_STEPS)
            elif len(playing.conversation.ids) + self.player.sampling.max_tokens > self.policy.context:
                # The agent filled its own context: its failure, scored as it stands, and counted apart.
                self._end(playing, Termination.CONTEXT)
            else:
                self._submit(playing)
        except TraceError as problem:
            self._end(playing, Termination.ERROR, problem)

    def _ended(self, playing: Playing, result: Callable[[], Any]) -> Trajectory:
        trajectory: Trajectory = result()
        self.policy.release(playing.episode.key)
        self._forget(playing.episode.key)
        return trajectory

    def _forget(self, key: str) -> None:
        del self.open[key]
        self.begun.pop(key, None)
        self.lanes.release(key)
