"""The one counter that every episode of a method goes through, whoever asked for it: diagnosis, redraws, calibration,
validation, choosing. It is stored as it happens (tables `method_accounts` and `episode_charges`), never inferred.

An episode is charged once to a method, by the id of its trajectory, before it is played; one of training when its
collection is stored. What several methods use is charged to an account that each of them inherits: the diagnosis of a
seed is played once, and counts for every method that looks at it. The test split is the final measurement. It is
written down under the purpose "test", and no budget pays for it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from db import EpisodeChargeRow, MethodAccountRow, Store
from errors import ConfigurationError, EpisodesSpent

TEST = "test"


@dataclass(frozen=True)
class Lender:
    """Another home of the same seed, whose episodes of the bare base are copied into a round instead of being played
    again; into none (None) where they only say what was spent, and nothing may be learnt or mined from them."""

    store: Store
    round_id: str | None

    def lend(self, ids: Sequence[str], to: Store) -> None:
        """Copy those of `ids` that are stored here and not there."""
        owed = self.store.stored_ids(set(ids) - to.stored_ids(ids))
        for row in self.store.trajectories(None, with_blobs=True, id=list(owed), adapter_id=None):
            to.add_trajectories([replace(row, round_id=self.round_id)])


class Account:
    """A method's account in the store of a seed. Whenever a training begins, `share` says how much of what is left it
    may take, so that those after it have theirs, and what follows all trainings is paid for; `proof` is what has to be
    left when the router's episodes are played: all, as long as nobody says less. What `lender` has of the episodes
    that are charged is taken from there.

    `dollars` says what language models have cost so far, in dollars; what is added while `working` is the method's.
    """

    def __init__(self, store: Store, method: str, dollars: Callable[[], float] = lambda: 0.0) -> None:
        self.store, self.method = store, method
        self.share: Callable[[int], int] = lambda left: left
        self.proof: Callable[[], int] = lambda: self.episodes
        self._dollars = dollars
        self._since: tuple[float, float] | None = None
        self.lender: Lender | None = None

    @classmethod
    def open(
        cls,
        store: Store,
        method: str,
        episodes: int,
        inherits: Sequence[str] = (),
        dollars: Callable[[], float] = lambda: 0.0,
    ) -> Account:
        """The account, made when it is not there. Raises `ConfigurationError` when it was made with another budget."""
        store.put([MethodAccountRow(method=method, episodes=episodes, inherits=list(inherits))])
        account = cls(store, method, dollars)
        if account.episodes != episodes:
            raise ConfigurationError(
                f"the account of {method!r} has a budget of {account.episodes} episodes, {episodes} are asked for; "
                "give that budget again, or another home"
            )
        return account

    @property
    def row(self) -> MethodAccountRow:
        found = self.store.row(MethodAccountRow, method=self.method)
        assert found is not None, "made when the account was opened"
        return found

    @property
    def episodes(self) -> int:
        """The most episodes that may be charged."""
        return self.row.episodes

    @property
    def rows(self) -> list[MethodAccountRow]:
        """The accounts whose costs are this method's: its own and all that it inherits."""
        known = {row.method: row for row in self.store.rows(MethodAccountRow)}
        found, owed = dict[str, MethodAccountRow](), [self.method]
        while owed:
            name = owed.pop()
            if name in known and name not in found:
                found[name] = known[name]
                owed += list(known[name].inherits)
        return list(found.values())

    def charged(self) -> dict[str, str]:
        """Purpose by trajectory id of everything that the method used, each once."""
        names = [row.method for row in self.rows]
        return {row.trajectory_id: row.purpose for row in self.store.rows(EpisodeChargeRow, method=names)}

    def counts(self) -> dict[str, int]:
        """Episodes by purpose, the test split's among them."""
        return dict(Counter(self.charged().values()))

    @property
    def spent(self) -> int:
        """Episodes that the budget paid for."""
        return sum(purpose != TEST for purpose in self.charged().values())

    @property
    def left(self) -> int:
        """Episodes that the budget still pays for; never below 0."""
        return max(0, self.episodes - self.spent)

    def admit(self, ids: Sequence[str], purpose: str) -> None:
        """Charge trajectories by id, each once. Raises `EpisodesSpent`, and charges none, when they are too many."""
        charged = self.charged()
        new = [i for i in dict.fromkeys(ids) if i not in charged]
        left = self.episodes - sum(known != TEST for known in charged.values())
        if purpose != TEST and len(new) > left:
            raise EpisodesSpent(
                f"{len(new)} more episodes ({purpose}) would pass the budget of {self.episodes} that {self.method!r} "
                f"has; {max(0, left)} are left"
            )
        if self.lender is not None:  # before they are charged: a process that dies here leaves them new
            self.lender.lend(new, self.store)
        self.store.put([EpisodeChargeRow(method=self.method, trajectory_id=i, purpose=purpose) for i in new])
        self._tick()

    def for_training(self, adapter: str) -> int:
        """The most episodes that the training of an adapter may play in all: its share. It is the same whenever it is
        asked: what this training has played itself is not taken off."""
        charged = self.charged()
        mine = self.store.trajectory_frame(None, columns=["id"], adapter_id=adapter, purpose="training")["id"]
        others = [i for i, purpose in charged.items() if purpose != TEST and i not in set(mine)]
        return max(0, self.share(self.episodes - len(others)))

    def unplayed(self, purpose: str) -> int:
        """Episodes of `purpose` that are paid for and not stored: of those that were played when a process died."""
        paid = [i for i, given in self.charged().items() if given == purpose]
        return len(paid) - len(self.store.trajectory_frame(None, columns=["id"], id=paid))

    def for_routing(self, adapters: Sequence[str], purpose: str) -> int:
        """The most episodes of `purpose` that these adapters may play for the router in all, `proof` left over; the
        same whenever it is asked: what they have played of it is not taken off."""
        charged = self.charged()
        frame = self.store.trajectory_frame(None, columns=["id", "adapter_id"], id=list(charged), purpose=purpose)
        sunk = int((~frame["adapter_id"].isin(list(adapters))).sum())
        others = sum(given not in (TEST, purpose) for given in charged.values())
        return max(0, self.episodes - others - sunk - self.proof())

    @contextmanager
    def working(self) -> Iterator[Account]:
        """Count seconds and dollars while the method works; what was counted survives a process that dies, up to the
        last episode that was charged."""
        self._since = time.monotonic(), self._dollars()
        try:
            yield self
        finally:
            self._tick()
            self._since = None

    def rest(self) -> None:
        """Count no more while this work goes on: another account does from now on."""
        self._tick()
        self._since = None

    def _tick(self) -> None:
        if self._since is None:
            return
        now, row = (time.monotonic(), self._dollars()), self.row
        seconds, dollars = row.seconds + now[0] - self._since[0], row.dollars + now[1] - self._since[1]
        self.store.put([replace(row, seconds=seconds, dollars=dollars)], replace=True)
        self._since = now
