"""One hierarchy for everything that can go wrong.

Every message says what was wrong, the value, and what to do. Each class is also the standard-library
class it stands for, so that callers who know only Python can still catch it. `boundary` names the part
of the system that an episode failed in: a failed episode is data (stored, counted, left out of every
denominator), never a reward of 0 and never a crash of the round.
"""

from __future__ import annotations


class TraceError(Exception):
    """Base of all errors that this project raises on purpose."""

    boundary = "pipeline"
    transient = False


class ConfigurationError(TraceError, ValueError):
    """A setting, profile, name or path that cannot work; raised before any work starts."""

    boundary = "configuration"


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
    """Errors took so many episodes that nothing may rest on those that are left; when they are played again, what took
    them may be over."""

    boundary = "environment"
    transient = True


class PolicyError(TraceError, RuntimeError):
    """A policy could not answer (model missing, wrong adapter, prompt longer than the context)."""

    boundary = "policy"


class NotFinite(PolicyError):
    """What a policy computes is no number any more: the weights of an adapter, or of a base, have come apart."""


class ContextOverflow(PolicyError):
    """A prompt plus its answer would not fit the context window."""


class ProviderError(PolicyError):
    """A model provider failed; `transient` when a retry may help."""

    boundary = "provider"

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient


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
    """A training that took longer than it may, again after it was ended and gone on with."""

    boundary = "training"


class StoreError(TraceError, OSError):
    """The database does not answer, cannot be written, or holds something impossible."""

    boundary = "store"


class TransitionError(StoreError):
    """A state change that the transition table does not allow."""


class StageHeld(StoreError):
    """Another process, which is alive, holds the stage that comes next: the round is that one's, and goes on there."""


class LabelError(TraceError, ValueError):
    """A labelling run that does not partition the trajectories, or names something unknown."""

    boundary = "contrast"


class TrainingError(TraceError, ArithmeticError):
    """Training cannot go on (NaN loss, no informative group, damaged checkpoint)."""

    boundary = "training"


class Untrainable(TrainingError):
    """One adapter cannot be trained: nothing in its environment tells rollouts apart, or its weights have come apart.
    It says nothing of what else a round trains."""


class TrainingMemoryError(TraceError, MemoryError):
    """A training does not fit the GPU's memory. No `TrainingError`: it says nothing of what there is to learn."""

    boundary = "training"


class AdapterError(TraceError, ValueError):
    """An adapter that is damaged, not the one registered, or does not change the model."""

    boundary = "adapter"
