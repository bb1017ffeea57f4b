"""The contract of a generated module in the words that a model is given, and the worked examples that go with it.

`docs/5-synthesis.md` says the same to people. What is promised here is checked by `static_checks`, `modules`, `goals`
and `validation`; a rule that only stands in this text does not exist.
"""

from __future__ import annotations

from pathlib import Path

from environments.sandbox.workers import MODULE_IMPORTS
from environments.synthesized.goals import MAX_WORDS

WORKED_EXAMPLES = Path(__file__).with_name("worked_examples")

CONTRACT = f"""\
Write one Python module. It is stateless: every function gets everything and returns everything, and nothing may be
kept between calls. It runs in a sandbox without files, network or processes, 3 seconds a call.
It may import: {", ".join(MODULE_IMPORTS)}. No eval, getattr, open, global, or double-underscore names.
Public names are exactly those below; helpers start with an underscore. The module begins with a docstring.

Constants
- CAPABILITY: the capability's name. TRANSFER: why practising here carries over to the target (8 words or more).
- TOOLS: OpenAI function schemas, with names and signatures of the target's tools. INSTRUCTIONS: the policy text.
  An agent that trains sees the target's own policy, tools and worked examples in front of your scenarios; it can call
  tools of the target that you leave out, and gets an error for that.
- MAX_STEPS: 1 to 30. EXAMPLES (optional): worked messages {{"role", "content", "tool_calls"}}.
- WRONG: at least three named policies that look plausible and must fail, each called like oracle.

Functions
- scenario(seed) -> {{"request": the user's first message, "state": JSON, "goal": JSON}}. All randomness comes from
  random.Random(seed). At least 100 of the first 200 seeds must give distinct scenarios.
- transition(state, call) -> {{"state": next state, "result": text or JSON, optional "done": true}}. `call` is
  {{"name", "arguments"}}, already checked against TOOLS. It never sees the goal and never raises: an impossible call is
  answered by a result with an error, in the target's shape.
- reply(state, text) -> {{"state", "message"}} (optional): the simulated user; message None ends the episode. Without it
  any message of the agent ends the episode.
- reward(scenario, state, log) -> number in [0, 1]; 1 only for full success, small for near misses, 0 for nothing.
  `log` lists what happened: {{"name", "arguments", "result"}}, {{"name", "error"}} for refused calls, {{"say": text}}.
- oracle(scenario, state, log) -> the next action of a perfect agent: {{"calls": [{{"name", "arguments"}}]}},
  {{"say": text}}, or None when there is nothing left to do.

Goal: judged outside the module, and the only thing that makes an episode a success. Keys (one of the first three at
least): "calls" (calls that must be made in this order with exactly these arguments), "state" (dotted path -> final
value), "says" (words the last message must hold, in at most {MAX_WORDS} words), "silent" (words no message may hold),
"allowed" (names of tools that may be called besides; every other call that takes effect fails the goal).

It is refused unless: equal seeds and actions give equal bytes in two processes; the oracle succeeds on at least 95 % of
100 seeds; saying nothing, saying one sentence always, and repeating one scenario's solution succeed on at most 5 %;
random actions on at most 20 %; your WRONG policies on at most 5 %; and none of 40 attacks (claims of success, keyword
stuffing, echoing, extra arguments, wrong types, repeated calls, every tool with every id) is ever rewarded with 0.95.
"""


def worked_examples() -> dict[str, str]:
    """Name -> source of the modules that are shown as examples."""
    paths = sorted(WORKED_EXAMPLES.glob("[a-z]*.py"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}
