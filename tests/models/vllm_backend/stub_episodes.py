"""Episodes on stub servers: several turns each, whose tokens are known beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from models.policy import Request, Sampling
from models.vllm.policy import VllmPolicy
from tests.models.vllm_backend.vllm_stub import sampled


@dataclass
class Episodes:
    """Conversations of `turns` turns of `tokens` tokens, each turn with a seed of its own."""

    count: int
    turns: int
    tokens: int = 4

    def expected(self) -> dict[int, list[tuple[int, ...]]]:
        """What every stub samples in them, by itself."""
        return {episode: self._alone(episode) for episode in range(self.count)}

    def _alone(self, episode: int) -> list[tuple[int, ...]]:
        prompt, turns = [1 + episode], list[tuple[int, ...]]()
        for number in range(self.turns):
            turns.append(tuple(sampled(prompt, 1000 * episode + number, self.tokens)))
            prompt += turns[-1]
        return turns

    def play(self, policy: VllmPolicy, answered: Callable[[int], None]) -> dict[int, list[tuple[int, ...]]]:
        """Play all at once; `answered` is called with the number of turns so far, after each."""
        prompts = {episode: [1 + episode] for episode in range(self.count)}
        played = {episode: list[tuple[int, ...]]() for episode in prompts}

        def submit(episode: int) -> None:
            sampling = Sampling(1.0, self.tokens, 1000 * episode + len(played[episode]))
            policy.submit(Request(str(episode), list(prompts[episode]), sampling))

        for episode in prompts:
            submit(episode)
        done = 0
        while done < self.count * self.turns:
            for answer in policy.poll():
                assert answer.problem is None, answer.problem
                done += 1
                answered(done)
                episode = int(answer.session)
                played[episode].append(answer.ids)
                prompts[episode] += answer.ids
                if len(played[episode]) < self.turns:
                    submit(episode)
                else:
                    policy.release(answer.session)
        return played
