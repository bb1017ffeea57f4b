"""The contract of a generated module in the words that a model is given, and the worked examples that go with it.

`docs/5-synthesis.md` says the same to people. What is promised here is checked by `static_checks`, `modules`, `goals`
and `validation`; a rule that only stands in this text does not exist.
"""

from __future__ import annotations

from pathlib import Path

from environments.sandbox.workers import MODULE_IMPORTS
from environments.synthesized.goals import MAX_WORDS
from environments.synthesized.static_checks import MAX_SOURCE
from environments.validation.lazy import LAZY_POLICIES
from environments.validation.levels import LEAST, MOST
from environments.validation.need import NeedLimits
from environments.validation.playing import FULL_REWARD

# Of the contract below: 2 asks for levels of difficulty, 1 did not. A module is stored with it.
VERSION = 2
WORKED_EXAMPLES = Path(__file__).with_name("worked_examples")
_NEED = NeedLimits()
_LAZY = "\n".join(f"- {lazy.name}: {lazy.tries}" for lazy in LAZY_POLICIES)

CONTRACT = f"""\
Write one Python module. It is stateless: every function gets everything and returns everything, and nothing may be
kept between calls. It runs in a sandbox without files, network or processes, 3 seconds a call. It has at most
{MAX_SOURCE:,} bytes.
It may import: {", ".join(MODULE_IMPORTS)}. No eval, getattr, open, global, or double-underscore names, and no clock
(today, now, utcnow): a scenario has the date that its state says.
Public names are exactly those below; helpers start with an underscore. The module begins with a docstring.

Constants
- CAPABILITY: the capability's name. TRANSFER: why practising here carries over to the target (8 words or more).
- TOOLS: OpenAI function schemas, with names and signatures of the target's tools; [] for a target that has none, whose
  agent answers in messages. INSTRUCTIONS: the policy text.
  An agent that trains sees the target's own policy, tools and worked examples in front of your scenarios; it can call
  tools of the target that you leave out, and gets an error for that.
- MAX_STEPS: 1 to 30, turns of the agent (a turn may hold several calls).
- LEVELS: {LEAST} to {MOST}, how many levels of difficulty scenario can make. Level 0 is the easiest that still needs
  the capability. Higher levels make the rest harder (more records, longer or less direct requests, more steps in
  between), never the capability optional: every check below is made at every level. Calibration looks for the level
  at which the agent succeeds about half of the time, and training raises it as the agent learns.
- STEP: which step of your oracle is the capability: {{"tool": name}} (its calls of that tool),
  {{"tool": name, "argument": name}} (what it fills in there), {{"say": "ask"}} (messages it says to be answered) or
  {{"say": "answer"}} (its last message). The pipeline plays your oracle without it: the calls or questions left out
  and what only they told made up, or with the argument or answer of another scenario.
- EXAMPLES (optional): a list of worked messages {{"role": "user", "assistant" or "tool", "content": text, "tool_calls":
  [{{"name", "arguments", "id"}}], "tool_call_id": id}}. Only the checks and people who play by hand see them: the agent
  that trains sees the target's own. Leave them out unless you need them.
- WRONG: at least three named policies that look plausible, act and must fail, each called like oracle. A later version
  keeps every name of the earlier ones and may add more.

Functions
- scenario(seed, level) -> {{"request": the user's first message, "state": JSON, "goal": JSON}}. All randomness comes
  from random.Random(seed). At least 100 of the first 200 seeds must give distinct scenarios. At every level a seed has
  the same kind of goal (tools in order, names of arguments, numbers of values), so draw the goal before you look at
  the level. No function but scenario is told the level.
- transition(state, call) -> {{"state": next state, "result": text or JSON, optional "done": true}}. `call` is
  {{"name", "arguments"}}, already checked against TOOLS. It never sees the goal and never raises: an impossible call is
  answered by a result with an error, in the target's shape.
- reply(state, text) -> {{"state", "message"}} (optional): the simulated user; message None ends the episode. Without it
  any message of the agent ends the episode.
- reward(scenario, state, log) -> number in [0, 1]; 1 for full success and only for that, small for near misses, 0 for
  nothing.
  `log` lists what happened: {{"name", "arguments", "result"}}, {{"name", "error"}} for refused calls, {{"say": text}}.
- oracle(scenario, state, log) -> the next action of a perfect agent: {{"calls": [{{"name", "arguments"}}]}},
  {{"say": text}}, or None when there is nothing left to do.

Goal: judged outside the module, and the only thing that makes an episode a success. Keys (one of the first three at
least): "calls" (calls that must be made in this order with exactly these arguments), "state" (dotted path -> final
value), "says" (words the last message must hold, in at most {MAX_WORDS} words), "silent" (words no message may hold),
"allowed" (names of tools that may be called besides; every other call that takes effect fails the goal). A call takes
effect when its tool is in TOOLS and its arguments fit the schema, so that transition answers it: also when the answer
is an error. So a wrong call costs the episode unless its tool is in "allowed", and tools that change anything are not.
Put a look-up that the capability needs into "calls", before what it decides.

It is refused unless: equal seeds and actions give equal bytes in every process, where sets have another order each
time; the oracle succeeds on at least 95 % of 100 seeds, each time with a reward of {FULL_REWARD:g} or more; saying
nothing, saying one sentence always, and repeating one scenario's solution succeed on at most 5 %; random actions on at
most 20 %; your WRONG policies on at most 5 %; and none of 40 attacks (claims of success, keyword stuffing, echoing,
extra arguments, wrong types, repeated calls, every tool with every id) is ever rewarded with {FULL_REWARD:g} or more,
which counts as success everywhere.

It is also refused unless it needs the capability. These lazy policies know which tools your oracle calls in which
order, and each may have at most {_NEED.success:.0%} success and {_NEED.reward:g} mean reward:
{_LAZY}
So never tell a value unasked or for a question that does not ask for it, let no wrong call be free, pay little for
calls that only have the right form, and let right values be one of a dozen or more: always taking one of two ways must
not pay in half of the scenarios. The oracle without STEP may succeed in at most {_NEED.success:.0%}. At most
{_NEED.repeats:.0%} of the scenarios may hold ids or numbers of the evidence or of the target's tasks: make up your own,
in the target's shapes.
"""


def worked_examples() -> dict[str, str]:
    """Name -> source of the modules that are shown as examples."""
    paths = sorted(WORKED_EXAMPLES.glob("[a-z]*.py"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}
