"""What can be said of a generated module without running it: the first check of the method's section 4.

These checks give a model early and precise reasons. They are not what keeps the host safe: the sandbox is.
"""

from __future__ import annotations

import ast
import re
import warnings

from environments.sandbox.workers import MODULE_IMPORTS
from environments.validation.levels import LEVELS_HELP
from environments.validation.step import STEP_HELP

MAX_SOURCE = 64 * 1024
# Function -> number of positional arguments.
FUNCTIONS = {"scenario": 2, "transition": 2, "reward": 3, "oracle": 3}
OPTIONAL_FUNCTIONS = {"reply": 2}
CONSTANTS = ("CAPABILITY", "TRANSFER", "TOOLS", "INSTRUCTIONS", "MAX_STEPS", "LEVELS", "STEP", "WRONG")
OPTIONAL_CONSTANTS = ("EXAMPLES",)
_HELP = {"STEP": STEP_HELP, "LEVELS": LEVELS_HELP}
FORBIDDEN_NAMES = frozenset(
    [
        "eval",
        "exec",
        "compile",
        "open",
        "input",
        "breakpoint",
        "globals",
        "locals",
        "vars",
        "getattr",
        "setattr",
        "delattr",
        "help",
        "memoryview",
        "exit",
        "quit",
        "SystemExit",
        "KeyboardInterrupt",
        "BaseException",
        "GeneratorExit",
    ]
)
# Attributes that lead from a value to frames, code and globals without two underscores in their names.
_FORBIDDEN_ATTRIBUTES = frozenset(
    [
        "gi_frame",
        "gi_code",
        "cr_frame",
        "cr_code",
        "ag_frame",
        "ag_code",
        "f_globals",
        "f_locals",
        "f_builtins",
        "f_back",
        "f_code",
        "tb_frame",
        "tb_next",
        "func_globals",
        "mro",
        "modules",
        "format_map",
    ]
)

# What reads the clock, of the imports that have any: scenarios and answers would be others on another day, which two
# runs of the other checks within one day do not see.
_CLOCK, _CLOCKED = frozenset(["today", "now", "utcnow"]), frozenset(["datetime", "calendar"])


def static_faults(source: str) -> list[str]:
    """What is wrong with the text of a module, each with its line; empty when it may be tried in the sandbox."""
    if len(source.encode("utf-8", "replace")) > MAX_SOURCE:
        return [f"the module is longer than {MAX_SOURCE} bytes"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except SyntaxError as error:
        return [f"line {error.lineno}: it does not parse: {error.msg}"]
    except (ValueError, RecursionError, MemoryError) as error:
        return [f"it does not parse: {type(error).__name__}: {error}"]
    try:
        return _shape_faults(tree) + [f"line {line}: {fault}" for line, fault in sorted(set(_use_faults(tree)))]
    except RecursionError:
        return ["it is nested too deeply to be checked"]


def wrong_names(source: str) -> tuple[str, ...]:
    """Names of the policies in a literal `WRONG`, read without running anything; () where it cannot be read."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    for node in tree.body:
        named = isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "WRONG" for t in node.targets)
        if named and isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return tuple(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
    return ()


def _shape_faults(tree: ast.Module) -> list[str]:
    """Required and unknown top-level names, and the number of arguments that each function takes."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    constants = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    faults = [f"the function {name} is missing" for name in FUNCTIONS if name not in functions]
    faults += [
        f"the constant {name} is missing" + (f": {_HELP[name]}" if name in _HELP else "")
        for name in CONSTANTS
        if name not in constants
    ]
    for name, count in (FUNCTIONS | OPTIONAL_FUNCTIONS).items():
        if name == "scenario" and "LEVELS" not in constants:
            continue  # a module without levels is told so once
        arguments = functions[name].args if name in functions else None
        if arguments is not None and (len(arguments.posonlyargs + arguments.args) != count or arguments.kwonlyargs):
            faults.append(f"the function {name} must take exactly {count} positional arguments")
    known = {*FUNCTIONS, *OPTIONAL_FUNCTIONS, *CONSTANTS, *OPTIONAL_CONSTANTS}
    public = {name for name in {*functions, *classes, *constants} if not name.startswith("_")}
    faults += [f"{name} is no name of the contract: helpers start with _" for name in sorted(public - known)]
    if not ast.get_docstring(tree):
        faults.append("the module has no docstring that says what it trains")
    return faults


def _use_faults(tree: ast.Module) -> list[tuple[int, str]]:
    faults: list[tuple[int, str]] = []
    clocked = _clocked_names(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            faults += [(line, _import_fault(alias.name)) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            faults.append((line, _import_fault(node.module or "." * node.level, node.level)))
        elif isinstance(node, ast.Name) and (node.id in FORBIDDEN_NAMES or _is_dunder(node.id)):
            faults.append((line, f"the name {node.id} is not available to modules"))
        elif isinstance(node, ast.Attribute) and (_is_dunder(node.attr) or node.attr in _FORBIDDEN_ATTRIBUTES):
            faults.append((line, f"the attribute {node.attr} is not available to modules"))
        elif isinstance(node, ast.Attribute) and node.attr in _CLOCK and _root(node) in clocked:
            faults.append((line, f"{node.attr} reads the clock: draw dates from random.Random(seed)"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"__\w+__", node.value):
            faults.append((line, "a string names a double-underscore attribute"))
        elif isinstance(node, ast.Global | ast.Nonlocal) and isinstance(node, ast.Global):
            faults.append((line, f"global {', '.join(node.names)}: a module keeps nothing between calls"))
        elif isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            faults.append((line, "a module is synchronous"))
    return [fault for fault in faults if fault[1]]


def _clocked_names(tree: ast.Module) -> set[str]:
    """The names under which a module has imported what knows the time."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name for alias in node.names if alias.name in _CLOCKED}
        elif isinstance(node, ast.ImportFrom) and node.module in _CLOCKED:
            names |= {alias.asname or alias.name for alias in node.names}
            names |= _CLOCKED | {"date"} if any(alias.name == "*" for alias in node.names) else set()
    return names


def _root(node: ast.expr) -> str:
    """The name that a chain of attributes and calls begins with; "" where it begins with none."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def _import_fault(name: str, level: int = 0) -> str:
    root = name.split(".")[0]
    if level == 0 and (root in MODULE_IMPORTS or root == "__future__"):
        return ""
    return f"import of {name} is forbidden; a module may import {', '.join(MODULE_IMPORTS)}"


def _is_dunder(name: str) -> bool:
    return name.startswith("__")
