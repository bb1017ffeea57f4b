"""Every target by name: the built-in one, the adapters, entry points of other packages, and dotted paths.

`describe_targets` works on a bare installation: an absent package is a line that says what is missing, not an error.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from environments.contract import SPLITS, Drawable, Target
from environments.targets import agentdojo, tau2, toolsandbox
from environments.targets.bfcl import target as bfcl
from environments.targets.bfcl.entries import CATEGORIES as BFCL_CATEGORIES
from environments.targets.bfcl.single import target as bfcl_single
from environments.targets.reasoning_gym import target as reasoning_gym
from environments.targets.third_party.adapter import TargetInfo, model_of_user, user_name
from environments.targets.third_party.simulated_user import UserModel
from errors import TargetError

ENTRY_POINTS = "trace_agent.environments"
_SHOP, _SHIFT = "environments.targets.shop:target", "environments.targets.shop:shift"
# How a target is built, given the simulated user's name (None: its default) and the model that plays one.
Builder = Callable[[str | None, UserModel | None], Any]


def _shop(path: str, user: str | None, user_model: UserModel | None) -> Any:
    return _from_path(path)


def _tau2(domain: str, user: str | None, user_model: UserModel | None) -> Any:
    tau2.data.load_data(domain, user_name(user))  # says what is missing before anything of tau2 is imported
    from environments.targets.tau2.target import Tau2Target

    return Tau2Target(domain, user, user_model)


def _toolsandbox(variant: str, user: str | None, user_model: UserModel | None) -> Any:
    toolsandbox.data.package_folder()  # says what is missing before anything of it is imported
    from environments.targets.toolsandbox.target import ToolSandboxTarget

    return ToolSandboxTarget(variant, user, user_model)


def _bfcl(category: str, user: str | None, user_model: UserModel | None) -> Any:
    return bfcl.BfclTarget(category)


def _bfcl_single(live: bool, user: str | None, user_model: UserModel | None) -> Any:
    return bfcl_single.live_target() if live else bfcl_single.SingleTarget()


def _agentdojo(suite: str, attacked: bool, user: str | None, user_model: UserModel | None) -> Any:
    return agentdojo.AgentDojoTarget(suite, attacked)


def _reasoning_gym(families: tuple[str, ...], user: str | None, user_model: UserModel | None) -> Any:
    return reasoning_gym.ReasoningGymTarget(families)


def _builders() -> dict[str, Builder]:
    """Name -> how to build the target."""
    builders: dict[str, Builder] = {"shop": partial(_shop, _SHOP), "shop:shift": partial(_shop, _SHIFT)}
    builders |= {f"tau2:{domain}": partial(_tau2, domain) for domain in tau2.DOMAINS}
    builders |= {"toolsandbox": partial(_toolsandbox, "base")}
    builders |= {"toolsandbox:augmented": partial(_toolsandbox, "augmented")}
    builders |= {f"bfcl:{category}": partial(_bfcl, category) for category in BFCL_CATEGORIES}
    builders |= {bfcl_single.NAME: partial(_bfcl_single, False), bfcl_single.LIVE_NAME: partial(_bfcl_single, True)}
    builders |= {reasoning_gym.NAME: partial(_reasoning_gym, reasoning_gym.DEFAULT_FAMILIES)}
    builders |= {f"agentdojo:{suite}": partial(_agentdojo, suite, False) for suite in agentdojo.SUITES}
    builders |= {f"agentdojo:{suite}:attacked": partial(_agentdojo, suite, True) for suite in agentdojo.SUITES}
    return builders


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}


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
        raise TargetError(f"target {path!r}: {error}") from error
    return value


def builtin_names() -> list[str]:
    """The names of the targets that come with the project."""
    return list(_builders())


def load_target(name: str, user: str | None = None, user_model: UserModel | None = None) -> Target:
    """The target called `name`.

    `name` is one of the built-in names (see `describe_targets`), `reasoning-gym:FAMILY,...`, the name of an entry point
    in the group `trace_agent.environments`, or a dotted path `package.module:object` to a target or to a function that
    returns one.
    `user` chooses who plays the simulated user where there is one: `scripted` (default) or `litellm:MODEL`, whom
    `user_model` plays. Raises TargetError on an unknown name, listing what exists and what is close, and when what the
    target needs is missing; ConfigurationError when the user needs a model and none is given.
    """
    builders, points = _builders(), _entry_points()
    families = reasoning_gym.families_of(name)
    if families:
        return reasoning_gym.ReasoningGymTarget(families)
    if name in builders:
        return _checked(name, builders[name](user, user_model))
    if name in points:
        try:
            return _checked(name, points[name].load())
        except (ImportError, AttributeError) as error:
            raise TargetError(f"entry point {name!r} ({points[name].value}) does not load: {error}") from error
    check_target_name(name)
    return _checked(name, _from_path(name))


def with_scripted_user(target: Target) -> Target:
    """The target itself, or with its scripted user where a model plays the user: a model would be paid for what
    depends on no user, as prompts and reference solutions do."""
    if model_of_user(str(getattr(target, "user", ""))) and target.name in builtin_names():
        return load_target(target.name)
    return target


def check_target_name(name: str) -> None:
    """Raise `TargetError` for a name that no target can have, listing what exists and what is close; nothing is
    loaded, so the target behind a good name may still lack something."""
    builders = _builders()
    known = [*builders, *_entry_points()]
    module, colon, attribute = name.partition(":")
    package = module.partition(".")[0]
    dotted = bool(colon and attribute) and module not in {builtin.partition(":")[0] for builtin in builders}
    if name in known or reasoning_gym.families_of(name) or (dotted and _is_found(package)):
        return
    why = f" (there is no module {package!r} here)" if dotted else ""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    raise TargetError(
        f"target {name!r} does not exist{why}{hint} There are: {', '.join(known)}; or package.module:object"
    )


def _is_found(package: str) -> bool:
    """Whether Python finds a package of this name; nothing of it is imported."""
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # no name that a package can have
        return False


def _describe_loaded(name: str, load: Callable[[], Target]) -> TargetInfo:
    """A line for a target that only loading can describe."""
    try:
        target = load()
        counts = {split: len(target.tasks(split)) for split in SPLITS}
        user, draws = getattr(target, "user", "none"), isinstance(target, Drawable)
        return TargetInfo(name, target.licence, counts, target.data_hash, user, draws=draws)
    except TargetError as error:
        return TargetInfo(name, "", missing=str(error))


def describe_targets(user: str | None = None) -> list[TargetInfo]:
    """One line per target that `load_target` knows by name, with the simulated user called `user` where it has one;
    never fails because something is absent."""
    lines = [_describe_loaded(name, partial(load_target, name)) for name in ("shop", "shop:shift")]
    lines += tau2.describe(user) + toolsandbox.describe(user)
    lines += bfcl.describe() + bfcl_single.describe() + reasoning_gym.describe() + agentdojo.describe()
    lines += [_describe_loaded(name, partial(load_target, name)) for name in _entry_points()]
    return lines
