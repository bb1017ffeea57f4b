"""Every target by name: the built-in one, the adapters, entry points of other packages, and dotted paths.

`describe_targets` works on a bare installation: an absent package is a line that says what is missing, not an error.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from environments.contract import Drawable, Target
from environments.targets import agentdojo, tau2, toolsandbox
from environments.targets.bfcl import target as bfcl
from environments.targets.bfcl.entries import CATEGORIES as BFCL_CATEGORIES
from environments.targets.bfcl.single import target as bfcl_single
from environments.targets.reasoning_gym import target as reasoning_gym
from environments.targets.third_party.adapter import TargetInfo, model_of_user, user_name
from environments.targets.third_party.simulated_user import UserModel
from environments.task_ids import checked_tasks
from errors import TargetError, TraceError

ENTRY_POINTS = "trace_agent.environments"
_SHOP, _SHIFT = "environments.targets.shop:target", "environments.targets.shop:shift"
# Gives a target, or a function that returns one.
Builder = Callable[[], Any]
logger = logging.getLogger("trace")


def _tau2(domain: str, user: str | None, user_model: UserModel | None) -> Any:
    tau2.data.load_data(domain, user_name(user))  # says what is missing before anything of tau2 is imported
    from environments.targets.tau2.target import Tau2Target

    return Tau2Target(domain, user, user_model)


def _toolsandbox(variant: str, user: str | None, user_model: UserModel | None) -> Any:
    toolsandbox.data.package_folder()  # says what is missing before anything of it is imported
    from environments.targets.toolsandbox.target import ToolSandboxTarget

    return ToolSandboxTarget(variant, user, user_model)


def _builders(user: str | None = None, user_model: UserModel | None = None) -> dict[str, Builder]:
    """Name -> how to build the target, with the simulated user called `user` (None: its default) where it has one."""
    builders: dict[str, Builder] = {"shop": partial(_from_path, _SHOP), "shop:shift": partial(_from_path, _SHIFT)}
    builders |= {f"tau2:{domain}": partial(_tau2, domain, user, user_model) for domain in tau2.DOMAINS}
    builders |= {"toolsandbox": partial(_toolsandbox, "base", user, user_model)}
    builders |= {"toolsandbox:augmented": partial(_toolsandbox, "augmented", user, user_model)}
    builders |= {f"bfcl:{category}": partial(bfcl.BfclTarget, category) for category in BFCL_CATEGORIES}
    builders |= {bfcl_single.NAME: bfcl_single.SingleTarget, bfcl_single.LIVE_NAME: bfcl_single.live_target}
    builders |= {reasoning_gym.NAME: reasoning_gym.ReasoningGymTarget}
    for ending, attacked in (("", False), (":attacked", True)):
        suites = agentdojo.SUITES
        builders |= {f"agentdojo:{s}{ending}": partial(agentdojo.AgentDojoTarget, s, attacked) for s in suites}
    return builders


def _builder(name: str, user: str | None = None, user_model: UserModel | None = None) -> Builder | None:
    """How to build the built-in target of a name; None for any other name."""
    families = reasoning_gym.families_of(name)
    return partial(reasoning_gym.ReasoningGymTarget, families) if families else _builders(user, user_model).get(name)


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """Those of other packages; a name of ours stays ours."""
    points = {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    for name in [name for name in points if _builder(name)]:
        _warn_of(name, points.pop(name).value)
    return points


@cache
def _warn_of(name: str, value: str) -> None:
    logger.warning("the entry point %r (%s) has the name of a built-in target and is left out; rename it", name, value)


def _of_others(name: str, load: Builder) -> Target:
    """A target that is not ours. Raises TargetError for whatever its module raises."""
    try:
        return _checked(name, load())
    except TraceError:
        raise
    except (Exception, SystemExit) as error:  # a script without a guard ends the process when it is imported
        raise TargetError(_why(name, error)) from error


def _why(name: str, error: BaseException) -> str:
    said = f"{type(error).__name__}: {error}"
    return f"target {name!r} does not load ({said}); mend it, or name another: 'trace-agent targets' lists them"


def _checked(name: str, loaded: Any) -> Target:
    """A target, or what a function without arguments returns. Raises TargetError when it is neither."""
    is_target = isinstance(loaded, Target) and not isinstance(loaded, type)
    target = loaded() if callable(loaded) and not is_target else loaded
    if not isinstance(target, Target) or isinstance(target, type):
        raise TargetError(
            f"{name!r} is a {type(target).__name__}, not a target: it needs name, data_hash, licence, tasks(split) and "
            "environment() (environments/contract.py)"
        )
    return target


def _from_path(path: str) -> Any:
    """The object at `package.module:object`."""
    module, _, attribute = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except ImportError as error:
        raise TargetError(f"target {path!r}: module {module!r} does not import: {error}") from error
    except AttributeError as error:
        place = getattr(sys.modules.get(module), "__file__", None) or "no file"
        raise TargetError(
            f"target {path!r}: {error}; module {module!r} is {place}: name what it holds, or give a file of yours that "
            "is called like it another name"
        ) from error
    return value


def builtin_names() -> list[str]:
    """The names of the targets that come with the project."""
    return list(_builders())


def is_builtin(target: Target) -> bool:
    """Whether a target comes with the project. One of somebody's own may be called like one that it was made from."""
    return target.name in builtin_names() and type(target).__module__.startswith(f"{__package__}.")


def groups() -> dict[str, list[str]]:
    """Benchmarks that an evaluation may name for all their domains, without variants (`...:attacked`): their names."""
    known = builtin_names()
    found: dict[str, list[str]] = {}
    for name in known:
        group, _, domain = name.partition(":")
        if domain and ":" not in domain and group not in known:
            found.setdefault(group, []).append(name)
    return found


def load_target(name: str, user: str | None = None, user_model: UserModel | None = None) -> Target:
    """The target called `name`.

    `name` is one of the built-in names (see `describe_targets`), `reasoning-gym:FAMILY,...`, the name of an entry point
    in the group `trace_agent.environments`, or a dotted path `package.module:object` to a target or to a function that
    returns one.
    `user` chooses who plays the simulated user where there is one: `scripted` (default) or `litellm:MODEL`, whom
    `user_model` plays. Raises TargetError on an unknown name, listing what exists and what is close, when what the
    target needs is missing, and for whatever the module of another's target raises; ConfigurationError when the user
    needs a model and none is given.
    """
    build = _builder(name, user, user_model)
    if build:
        return _checked(name, build())
    point = _entry_points().get(name)
    if point:
        return _of_others(name, point.load)
    check_target_name(name)
    return _of_others(name, partial(_from_path, name))


def with_scripted_user(target: Target) -> Target:
    """The target itself, or with its scripted user where a model plays the user: a model would be paid for what
    depends on no user, as prompts and reference solutions do."""
    if model_of_user(str(getattr(target, "user", ""))) and target.name in builtin_names():
        return load_target(target.name)
    return target


def without_model(target: Target) -> Target | None:
    """The target as it can be played without asking a model; None where a model plays the user of somebody's own
    target, which has no other."""
    scripted = with_scripted_user(target)
    return None if model_of_user(str(getattr(scripted, "user", ""))) else scripted


def check_target_name(name: str) -> None:
    """Raise `TargetError` for a name that no target can have, listing what exists and what is close; nothing is
    loaded, so the target behind a good name may still lack something."""
    points = _entry_points()
    known = [*builtin_names(), *points]
    module, colon, attribute = name.partition(":")
    package = module.partition(".")[0]
    dotted = bool(colon and attribute) and module not in {builtin.partition(":")[0] for builtin in builtin_names()}
    if _builder(name) or name in points or (dotted and _is_found(package)):
        return
    why = f" (there is no module {package!r} here)" if dotted else ""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    raise TargetError(
        f"target {name!r} does not exist{why}{hint} There are: {', '.join(known)}; {reasoning_gym.NAME}:FAMILY,...; to "
        f"evaluate on all targets of a benchmark, {', '.join(groups())}; or package.module:object"
    )


def _is_found(package: str) -> bool:
    """Whether Python finds a package of this name; nothing of it is imported."""
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # no name that a package can have
        return False


def _describe_loaded(name: str) -> TargetInfo:
    """A line for a target that only loading can describe."""
    try:
        target = load_target(name)
        counts = {split: len(tasks) for split, tasks in checked_tasks(target).items()}
        user, draws = str(getattr(target, "user", "none")), isinstance(target, Drawable)
        return TargetInfo(name, str(target.licence), counts, target.data_hash, user, draws=draws)
    except TargetError as error:
        return TargetInfo(name, "", missing=str(error))
    except Exception as error:  # the tasks of somebody's own target may raise anything
        return TargetInfo(name, "", missing=_why(name, error))


def describe_targets(user: str | None = None) -> list[TargetInfo]:
    """One line per target that `load_target` knows by name, with the simulated user called `user` where it has one;
    never fails because something is absent."""
    lines = [_describe_loaded(name) for name in ("shop", "shop:shift")]
    lines += tau2.describe(user) + toolsandbox.describe(user)
    lines += bfcl.describe() + bfcl_single.describe() + reasoning_gym.describe() + agentdojo.describe()
    lines += [_describe_loaded(name) for name in _entry_points()]
    return lines
