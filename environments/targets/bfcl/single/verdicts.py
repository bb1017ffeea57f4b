"""BFCL's verdict on an answer by its own AST checker, and the checks behind it, an argument at a time."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

from environments.contract import Check
from environments.targets.bfcl.single.answers import Calls
from environments.targets.bfcl.single.items import Item
from environments.targets.third_party.adapter import TOOL_ERRORS

# The capabilities, in the words of the checks.
READABLE = "write_readable_call"
ONE_CALL = "make_one_call"
ALL_CALLS = "make_all_calls"
OFFERED = "use_offered_function"
CHOOSE = "choose_right_function"
ARGUMENTS = "fill_arguments"
DECLINE = "decline_without_function"

_CONFIG = "bfcl_eval.constants.model_config"
# BFCL's checker asks how a model writes dots in names; ours writes them as they are.
_MODEL = "trace"
# Episodes are played in threads. While one imports the checker `sys.modules` is not as others know it, so all wait.
_IMPORTING = threading.Lock()


def _checker() -> Callable[..., dict[str, Any]]:
    """BFCL's `ast_checker` for Python, imported once, by one thread."""
    with _IMPORTING:
        return _imported()


@cache
def _imported() -> Callable[..., dict[str, Any]]:
    """BFCL's `ast_checker` for Python, for one thread at a time.

    Its module wants the table of all models that BFCL knows, and importing that imports their clients (torch, vLLM, a
    dozen providers), which are not installed here. It only looks up one model's `underscore_to_dot`, so a table of one
    model stands in for it while the module is imported. In `sys.modules` table and checker are as before afterwards, so
    that whoever imports the checker by its full name gets a module of its own, with the table of all models; the parts
    of BFCL that the checker itself needs stay imported.
    """
    name = "bfcl_eval.eval_checker.ast_eval.ast_checker"
    stand_in = ModuleType(_CONFIG)
    vars(stand_in)["MODEL_CONFIG_MAPPING"] = {_MODEL: SimpleNamespace(underscore_to_dot=False)}
    before = {key: sys.modules.pop(key, None) for key in (_CONFIG, name)}
    sys.modules[_CONFIG] = stand_in
    try:
        module = importlib.import_module(name)
        python = importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON
    finally:
        for key, value in before.items():
            sys.modules.pop(key, None)
            if value is not None:
                sys.modules[key] = value

    def check(functions: Sequence[Any], calls: Calls, reference: Sequence[Any], category: str) -> dict[str, Any]:
        found: dict[str, Any] = module.ast_checker(functions, calls, reference, python, category, _MODEL)
        return found

    return check


def _judged(category: str, functions: Sequence[Any], reference: Sequence[Any], calls: Calls) -> tuple[bool, str]:
    check = _checker()  # what its import raises is no verdict on an answer
    try:
        found = check(list(functions), list(calls), list(reference), category)
        return bool(found["valid"]), "" if found["valid"] else str(found["error"])
    except TOOL_ERRORS as error:  # it raises on some values of the wrong shape, its error on integers of many digits
        return False, f"{type(error).__name__}: {error}"


def bfcl_verdict(item: Item, calls: Calls | None) -> tuple[bool, str]:
    """Whether BFCL takes an answer for right, and what it says when not; `calls` is None when it could not be read."""
    if not item.reference:
        return not calls, "" if not calls else "calls a function where none fits"
    return _judged(item.category, item.functions, item.reference, calls) if calls else (False, "no call")


def argument_verdict(
    function: Mapping[str, Any], key: str, accepted: Sequence[Any], given: Mapping[str, Any]
) -> tuple[bool, str]:
    """BFCL's verdict on one argument of a call: the checker is shown a function that has no other."""
    parameters = function["parameters"]
    properties = {key: parameters["properties"][key]} if key in parameters["properties"] else {}
    required = [key] if key in parameters.get("required", ()) else []
    alone = {"name": function["name"], "parameters": {"properties": properties, "required": required}}
    made = {function["name"]: {key: given[key]} if key in given else {}}
    return _judged("simple_python", [alone], [{function["name"]: {key: accepted}}], [made])


def checks_of(item: Item, calls: Calls | None, problem: str = "") -> list[Check]:
    """The checks of an answer. `calls` is None when it could not be read; `problem` then says why.

    Every reference call is compared with the made call of that function that has most arguments right, each with one.
    An argument that may be left out and was is not required.
    """
    reference, readable = item.reference, calls is not None
    if not reference:
        declined = readable and not calls
        said = "" if declined else problem or "called a function that does not fit"
        return [Check("readable", READABLE, False, readable, problem), Check("declined", DECLINE, True, declined, said)]
    made, kind = calls or (), ONE_CALL if len(reference) == 1 else ALL_CALLS
    checks = [
        Check("readable", READABLE, True, readable, problem),
        Check("count", kind, True, len(made) == len(reference), f"{len(made)} calls, {len(reference)} wanted"),
    ]
    described = {function["name"]: function for function in item.functions}
    judged = [[_call_checks(described, i, wanted, call) for call in made] for i, wanted in enumerate(reference)]
    pairs = [pair for pair in product(range(len(reference)), range(len(made))) if judged[pair[0]][pair[1]][0].passed]
    taken: dict[int, int] = {}
    for index, place in sorted(pairs, key=lambda pair: -_share(judged[pair[0]][pair[1]])):
        if index not in taken and place not in taken.values():
            taken[index] = place
    for index, wanted in enumerate(reference):
        checks += judged[index][taken[index]] if index in taken else _call_checks(described, index, wanted, None)
    return checks


def _share(checks: Sequence[Check]) -> float:
    needed = [check for check in checks if check.required]
    return sum(check.passed for check in needed) / len(needed)


def _call_checks(
    described: Mapping[str, Mapping[str, Any]],
    index: int,
    wanted: Mapping[str, Mapping[str, Sequence[Any]]],
    call: Mapping[str, Mapping[str, Any]] | None,
) -> list[Check]:
    """Function, each argument and superfluous arguments of one reference call, against one made call or none."""
    ((name, accepted_values),) = wanted.items()
    given = (call or {}).get(name)
    kind = CHOOSE if len(described) > 1 else OFFERED
    checks = [Check(f"call{index}:function", kind, True, given is not None, f"{name} wanted")]
    for key, accepted in accepted_values.items():
        optional = "" in accepted and key not in described[name]["parameters"].get("required", ())
        right, said = False, "not called"
        if given is not None:
            right, said = argument_verdict(described[name], key, accepted, given)
        needed = not optional or (given is not None and key in given)
        checks.append(Check(f"call{index}:argument:{key}", ARGUMENTS, needed, right or not needed, said))
    extra = sorted(set(given or {}) - set(accepted_values))
    checks.append(Check(f"call{index}:unknown_arguments", ARGUMENTS, bool(extra), not extra, f"{extra} not wanted"))
    return checks


def credit(checks: Sequence[Check], calls: Calls | None, wanted: int) -> float:
    """How near an answer without success came, in [0, 1]: the share of required checks that passed, where a call too
    many costs as much as a passed check earns. 0 for an answer without a call, and where declining was right."""
    if not calls or not wanted:
        return 0.0
    needed = [check for check in checks if check.required and check.kind != READABLE]
    earned = sum(check.passed for check in needed) - max(0, len(calls) - wanted)
    return max(0.0, earned / len(needed))
