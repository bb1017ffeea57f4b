"""One hierarchy for everything that can go wrong.

Every message says what was wrong, the value, and what to do. Each class is also the standard-library
class it stands for, so that callers who know only Python can still catch it. `boundary` names the part
of the system that failed. A failed episode is data (stored, counted, left out of every denominator),
never a reward of 0 and never a crash of the round. `transient`: the same work may succeed when it is
done again, so stages are retried. `lasting`: it fails again whenever it is done, wherever that is.
"""

from __future__ import annotations


class TraceError(Exception):
    """Base of all errors that this project raises on purpose."""

    boundary = "pipeline"
    transient = False
    lasting = False


class ConfigurationError(TraceError, ValueError):
    """A setting, profile, name or path that cannot work; raised before any work starts."""

    boundary = "configuration"


class NoHome(ConfigurationError):
    """A place where no round has made a home, yet."""


class TargetError(TraceError, LookupError):
    """A target, split, task or its data is missing or damaged."""

    boundary = "target"


class EnvironmentFault(TraceError, RuntimeError):
    """An environment raised, stalled, or returned something outside the contract."""

    boundary = "environment"


class CallOverdue(EnvironmentFault):
    """A call into an environment did not return within its limit; on another day it may."""


class SandboxError(EnvironmentFault):
    """The sandbox refused, died, or passed its deadline."""

    boundary = "sandbox"


class EpisodesLost(TraceError, RuntimeError):
    """So many episodes were lost to errors that nothing may rest on those that are left. When they are played again,
    the cause may be gone."""

    boundary = "environment"
    transient = True


class PolicyError(TraceError, RuntimeError):
    """A policy could not answer (model missing, wrong adapter, prompt longer than the context)."""

    boundary = "policy"


class NotFinite(PolicyError):
    """A policy computes values that are not finite: the weights of an adapter, or of the base, have diverged."""


class ContextOverflow(PolicyError):
    """A prompt plus its answer would not fit the context window."""


class ProviderError(PolicyError):
    """A model provider failed; `transient` when a retry may help, `unpaid` when it waits for a person to pay it."""

    boundary = "provider"

    def __init__(self, message: str, *, transient: bool = False, unpaid: bool = False) -> None:
        super().__init__(message)
        self.transient, self.unpaid = transient, unpaid


class BudgetExceeded(TraceError, RuntimeError):
    """The next call would pass a hard cap on rollouts, tokens or money; raised before that call."""

    boundary = "budget"


class EpisodesSpent(BudgetExceeded):
    """The next episodes would pass what a method may play; raised before the first of them."""


class LimitReached(BudgetExceeded):
    """A round has taken what `limits` allow it; with a larger limit the same command goes on."""


class TargetBusy(TraceError, RuntimeError):
    """Another run of a deployment works on the target; this one ends as cancelled."""


class ServersBusy(TargetBusy):
    """Another process trains on a GPU that it shares with the vLLM servers, which sleep for it meanwhile."""


class NotApproved(TraceError, TimeoutError):
    """Nobody answered whether a release may be promoted; the next run of the round asks again."""

    boundary = "approval"


class TrainingStuck(TraceError, TimeoutError):
    """A training passed its time limit, was ended and resumed, and passed the limit again."""

    boundary = "training"


class StoreError(TraceError, OSError):
    """The database does not answer, cannot be written, or holds something impossible."""

    boundary = "store"


class TransitionError(StoreError):
    """A state change that the transition table does not allow."""


class StageHeld(StoreError):
    """A living process holds the next stage: the round belongs to that one, and goes on there."""


class LabelError(TraceError, ValueError):
    """A labelling run that does not partition the trajectories, or names something unknown."""

    boundary = "contrast"


class TrainingError(TraceError, ArithmeticError):
    """Training cannot go on (NaN loss, no informative group, damaged checkpoint)."""

    boundary = "training"


class Untrainable(TrainingError):
    """One adapter cannot be trained: nothing in its environment tells rollouts apart, or its weights have diverged.
    Other trainings of the round are not affected."""


class TrainingMemoryError(TraceError, MemoryError):
    """A training does not fit the GPU's memory. Not a `TrainingError`, which is about what there is to learn."""

    boundary = "training"


class AdapterError(TraceError, ValueError):
    """An adapter that is damaged, not the one registered, or does not change the model."""

    boundary = "adapter"
