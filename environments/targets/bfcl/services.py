"""BFCL's simulated services: instances of our own, and calls on them without building source text."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from decimal import localcontext
from typing import Any

from environments.targets.third_party.adapter import TOOL_ERRORS
from errors import TargetError

# Digits that numbers may have, and what `MathAPI` takes that says how many it computes.
MOST_DIGITS = 10_000
_COUNTS = ("precision", "decimal_places")
# With long results BFCL's services write what they found into a record of their module, which all episodes share, and
# give that: until it is written out, no other may call.
_SHARED_RECORD = threading.Lock()
# It sets the precision of all of mpmath, for whoever computes in another thread too, and its result is written with it.
_SHARED_PRECISION = "logarithm"
# What BFCL fills up with records of a module, as they are, for long results: one episode's payment would be missing on
# the cards of all others.
_SHARED = ("credit_card_list", "booking_record")


class Services:
    """The simulated services of one entry, and calls on them. Instances are held here, not in BFCL's module globals."""

    def __init__(self, entry: Mapping[str, Any], long_context: bool) -> None:
        from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING, STATELESS_CLASSES

        self._alone: AbstractContextManager[Any] = _SHARED_RECORD if long_context else nullcontext()
        self.instances: dict[str, Any] = {}
        self._methods: dict[str, Any] = {}
        for service in entry["involved_classes"]:
            instance = getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[service]), service)()
            if service not in STATELESS_CLASSES:
                instance._load_scenario(
                    copy.deepcopy(entry["initial_config"].get(service, {})), long_context=long_context
                )
            for held in _SHARED if long_context else ():
                if hasattr(instance, held):
                    setattr(instance, held, copy.deepcopy(getattr(instance, held)))
            self.instances[service] = instance
            for name, method in inspect.getmembers(instance, predicate=inspect.ismethod):
                if not name.startswith("_"):
                    self._methods[name] = method

    def call(self, name: str, arguments: Mapping[str, Any], positional: Sequence[Any] = ()) -> tuple[str, bool]:
        """The result as BFCL writes it, and whether the call failed."""
        try:
            _check_size(name, arguments)
            alone = _SHARED_RECORD if name == _SHARED_PRECISION else self._alone
            with alone, localcontext():  # `square_root` sets the precision of all decimals of a thread
                return _written(self._methods[name](*positional, **arguments)), False
        except TOOL_ERRORS as error:  # also of a result that cannot be written: an integer of too many digits
            return f"Error during execution: {error}", True

    def named(self, name: str, positional: Sequence[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Positional arguments under their names."""
        return dict(inspect.signature(self._methods[name]).bind(*positional, **arguments).arguments)


def _check_size(name: str, arguments: Mapping[str, Any]) -> None:
    """Raise `ValueError` for numbers that `MathAPI` would compute with for hours, inside one operation that nothing can
    interrupt."""
    for key in _COUNTS:
        if _size(arguments.get(key)) > MOST_DIGITS:
            raise ValueError(f"{key} is too large; use one of at most {MOST_DIGITS}")
    base, exponent = arguments.get("base"), arguments.get("exponent")
    bits = exponent * (base.bit_length() - 1) if isinstance(base, int) and isinstance(exponent, int) else 0
    if name == "power" and bits > 4 * MOST_DIGITS:
        raise ValueError(f"the result has more than {MOST_DIGITS} digits")


def _size(value: Any) -> float:
    """How far from 0 a number is, also one that is written as a text; 0 for what is none, which the tools refuse."""
    try:
        return abs(float(value))
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return 0.0


def _written(value: Any) -> str:
    """A result as BFCL writes it."""
    if isinstance(value, dict):
        try:
            return json.dumps(value)
        except TypeError:
            return str(value)
    return str(value)


def parse_call(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """A reference call, e.g. `sort('a.txt')`, taken apart without running it. Raises TargetError when it is not one."""
    try:
        node = ast.parse(text, mode="eval").body
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            named = {str(item.arg): ast.literal_eval(item.value) for item in node.keywords}
            return node.func.id, [ast.literal_eval(item) for item in node.args], named
    except (SyntaxError, ValueError) as error:
        raise TargetError(f"BFCL reference call {text!r} cannot be read: {error}; install bfcl-eval again") from error
    raise TargetError(f"BFCL reference call {text!r} is not a call of one function; install bfcl-eval again")
