"""A reference solution read off a scenario's milestones: what to call or say so that each of them is reached.

ToolSandbox ships no solutions. Its milestones say how the databases must look, which calls must have been made (some
with values taken from an earlier call's result) and what the agent must say. Walking them in a topological order and
making each true gives a solution.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import networkx
from tool_sandbox.common.evaluation import Milestone, MilestoneMatcher, guardrail_similarity
from tool_sandbox.common.execution_context import DatabaseNamespace, ExecutionContext

from environments.contract import Action, ToolCall

# What a call without arguments in a milestone needs to be accepted: any criterion that finds something.
_BROAD: Mapping[str, Mapping[str, Any]] = {
    "search_contacts": {"is_self": False},
    "search_messages": {"creation_timestamp_lowerbound": 400_000_000.0},  # 1982; it refuses dates before 1980
    "search_reminder": {"creation_timestamp_lowerbound": 400_000_000.0},
}
_SETTERS = {
    "cellular": "set_cellular_service_status",
    "wifi": "set_wifi_status",
    "location_service": "set_location_service_status",
    "low_battery_mode": "set_low_battery_mode_status",
}
_TABLES = {
    DatabaseNamespace.CONTACT: ("contact", "person_id"),
    DatabaseNamespace.REMINDER: ("reminder", "reminder_id"),
}
# Columns that a table's tools can set.
_WRITABLE = {
    DatabaseNamespace.CONTACT: ("name", "phone_number", "relationship", "is_self"),
    DatabaseNamespace.REMINDER: ("content", "reminder_timestamp", "latitude", "longitude"),
}


def order(matcher: MilestoneMatcher) -> list[int]:
    """Milestones in a topological order: settings as early as possible, then by index, as their authors wrote them.

    Guardrails compare whole tables between milestones, so a setting that is changed late (Wi-Fi switched on between a
    clock reading and its use) breaks them.
    """
    if networkx.number_of_nodes(matcher.milestone_dag) == 0:
        return []

    def rank(node: int) -> tuple[bool, int]:
        first = constraints(matcher.milestones[node])[0]
        return first.database_namespace != DatabaseNamespace.SETTING, node

    return [int(node) for node in networkx.lexicographical_topological_sort(matcher.milestone_dag, key=rank)]


def measure_name(constraint: Any) -> str:
    """The name of a constraint's similarity function, also where it is a partial."""
    function = constraint.snapshot_constraint
    return str(getattr(function, "func", function).__name__)


def constraints(milestone: Milestone) -> list[Any]:
    """The constraints that say what must happen; guardrails only say what must not."""
    return [item for item in milestone.snapshot_constraints if item.snapshot_constraint is not guardrail_similarity]


def is_spoken(milestone: Milestone) -> bool:
    """Whether the milestone is about what the agent tells the user."""
    return any(
        item.database_namespace == DatabaseNamespace.SANDBOX and "content" in item.target_dataframe.columns
        for item in constraints(milestone)
    )


def actions(
    milestones: Sequence[Milestone], index: int, traces: Mapping[int, Sequence[str]], context: ExecutionContext
) -> list[Action]:
    """The actions that reach milestone `index` in the present state; none when it is reached already.

    `traces` are the tool traces (JSON) of the calls made for earlier milestones, by milestone.
    """
    milestone = milestones[index]
    wanted = constraints(milestone)
    first = wanted[0]
    if first.database_namespace == DatabaseNamespace.SANDBOX:
        if is_spoken(milestone):
            return [Action(content=_sentence(wanted, traces))]
        return [_call_of_trace(wanted, traces, milestones)]
    return _writes(first, context)


def _filled(constraint: Any, traces: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """The values that a constraint takes from an earlier call's result."""
    if measure_name(constraint) != "tool_trace_dependant_similarity":
        return {}
    extractor = constraint.snapshot_constraint.keywords["extractor"]
    for trace in traces.get(constraint.reference_milestone_node_index, ()):
        found = extractor(json.loads(trace))
        if found:
            return dict(found[0])
    return {}


def _sentence(wanted: Sequence[Any], traces: Mapping[int, Sequence[str]]) -> str:
    """The longest of the texts asked for; the shorter ones are facts that it must contain."""
    texts = []
    for item in wanted:
        text, values = str(item.target_dataframe["content"][0]), _filled(item, traces)
        texts.append(text.format(**values) if values else text)
    return max(texts, key=len)


def _broad(name: str, milestones: Sequence[Milestone]) -> dict[str, Any]:
    """Arguments for a call whose milestone names none."""
    if name != "datetime_info_to_timestamp":
        return dict(_BROAD.get(name, {}))
    tables = [item.target_dataframe for milestone in milestones for item in constraints(milestone)]
    stamps = [table["reminder_timestamp"][0] for table in tables if "reminder_timestamp" in table.columns]
    if not stamps:
        return {}
    when = datetime.datetime.fromtimestamp(stamps[0])
    return {unit: getattr(when, unit) for unit in ("year", "month", "day", "hour", "minute", "second")}


def _call_of_trace(
    wanted: Sequence[Any], traces: Mapping[int, Sequence[str]], milestones: Sequence[Milestone]
) -> Action:
    trace = json.loads(wanted[0].target_dataframe["tool_trace"][0])
    trace = trace[0] if isinstance(trace, list) else trace
    name, arguments = trace["tool_name"], dict(trace["arguments"])
    for item in wanted:
        arguments |= _filled(item, traces)
    return Action(tool_calls=(ToolCall(name, arguments or _broad(name, milestones)),))


def _writes(constraint: Any, context: ExecutionContext) -> list[Action]:
    table, rows = constraint.database_namespace, constraint.target_dataframe.to_dicts()
    present = context.get_database(table).to_dicts()
    kind = measure_name(constraint)
    if table == DatabaseNamespace.SETTING:
        changes = {column: value for row in rows for column, value in row.items() if present[0][column] != value}
        return [_call(_SETTERS[column], {"on": value}) for column, value in changes.items() if column in _SETTERS]
    if table == DatabaseNamespace.MESSAGING:
        return [
            _call(
                "send_message_with_phone_number",
                {"phone_number": row["recipient_phone_number"], "content": row["content"]},
            )
            for row in rows
        ]
    noun, key = _TABLES[table]
    if kind == "removal_similarity":
        return [_call(f"remove_{noun}", {key: row[key]}) for row in rows]
    if kind == "addition_similarity":
        return [_call(f"add_{noun}", {k: v for k, v in row.items() if k in _WRITABLE[table]}) for row in rows]
    before = {row[key]: row for row in present}
    calls = []
    for row in rows:
        changes = {k: v for k, v in row.items() if k in _WRITABLE[table] and before.get(row[key], {}).get(k) != v}
        if changes:
            calls.append(_call(f"modify_{noun}", {key: row[key], **changes}))
    return calls


def _call(name: str, arguments: Mapping[str, Any]) -> Action:
    return Action(tool_calls=(ToolCall(name, arguments),))
