"""What labelling costs outside the model: 1,000 trajectories x 10 capabilities x 10 runs through the real stage.

    python -m benchmarks.labelling

Compaction, batches, requests, the analyst's hashing, cache and spend on a SQLite file, checks, the frame of labels,
selection and agreement are real; only the completion is answered at once by a stand-in. Bounds: 60 s and 1 GiB. The
process exits with 1 when one is missed.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from db import open_store
from models.providers import client as client_module
from models.providers.analyst import Analyst, AnalystSettings
from models.providers.analyst_store import StoredReplies, StoredSpend
from models.providers.client import ModelClient
from models.providers.litellm_client import Completion, ModelCall
from tasks.mining.agreement import agreement
from tasks.mining.labelling import MinedCapability, MiningSettings, Transcript, label
from tasks.mining.selection import select

TRAJECTORIES, CAPABILITIES, RUNS = 1000, 10, 10
NAMES = [f"capability_number_{chr(97 + n)}" for n in range(CAPABILITIES)]


async def instant_completion(call: ModelCall) -> Completion:
    """Stands in for the model: LACKING for failed-looking trajectories, PRESENT for the others."""
    blocks = re.findall(r"### (T\d+)\n(.*?)(?=\n\n###|\Z)", call.messages[1]["content"], re.S)
    rows = [
        {"trajectory": alias, "capability": name, "label": "LACKING" if "error" in text else "PRESENT"}
        for alias, text in blocks
        for name in NAMES
    ]
    return Completion(json.dumps({"labels": rows}), prompt_tokens=1000, sampled_tokens=10 * len(rows))


def transcript(n: int) -> Transcript:
    """Eight turns with results of 600 characters."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Please change order W{n} as agreed."}]
    for turn in range(8):
        call = {"name": "get_order", "arguments": {"order_id": f"W{n}", "page": turn}, "id": f"c{turn}"}
        failed = n % 3 and turn == 5
        text = '{"error": "order is locked"}' if failed else json.dumps({"order": n, "text": "lorem ipsum " * 50})
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        messages += [{"role": "tool", "content": text, "tool_call_id": f"c{turn}"}]
    return Transcript(f"t{n:04}", [*messages, {"role": "assistant", "content": "Done."}], n % 3 == 0)


def main() -> int:
    client_module.send = instant_completion
    candidates = [MinedCapability(name, "A definition of two sentences. It is exact.", (), (), "") for name in NAMES]
    transcripts = [transcript(n) for n in range(TRAJECTORIES)]
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{Path(folder) / 'trace.db'}")
        round_id = store.start_round("benchmark", "hash", 0, "benchmark", {}).id
        settings = AnalystSettings("benchmark/instant", prompt_price=0.0, sampled_price=0.0, max_tokens=16000)
        client = ModelClient(log=StoredSpend(store, round_id))
        analyst = Analyst(settings, client, StoredReplies(store))
        started, processor = time.perf_counter(), time.process_time()
        found = label(analyst, transcripts, candidates, "## Policy\nBe careful.", MiningSettings(runs=RUNS, batch=5))
        selections = select(found.labels, n=RUNS)
        kappa, _ = agreement(found.labels)
        took, processor = time.perf_counter() - started, time.process_time() - processor
        requests = store.spent(round_id)["calls"]
        client.close()
        store.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    selected = sum(selection.selected for selection in selections)
    print(f"labels {len(found.labels):,} in {requests:.0f} requests, {selected} selected, kappa {kappa}")
    print(f"seconds outside the model   {took:8.1f}   (at most 60)")
    print(f"processor seconds           {processor:8.1f}   (the stand-in included)")
    print(f"peak memory of the process  {peak:8.2f} GiB (at most 1)")
    met = took <= 60 and peak <= 1
    print("all bounds met" if met else "A BOUND IS MISSED")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
