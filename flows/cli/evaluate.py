"""`trace-agent evaluate`: success of a policy on a target's split, with its interval, and always the no-op row."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from flows.cli.options import AsJson, Home, printed, result_alone

# As of a round's seed (settings.LARGEST): a larger one is refused by the database, after its episodes were played.
LARGEST = 2**31 - 1
# All of a run's episodes are listed before the first one: a number that was mistyped would take all memory for them.
MOST_TRIALS = 1000


def evaluate(
    target: Annotated[str, typer.Option(help="Such as shop or tau2:retail; tau2 stands for all its domains.")],
    split: Annotated[str, typer.Option(help="diagnosis, validation or test.")] = "test",
    policy: Annotated[
        str,
        typer.Option(
            help="release\\[@N] (0: the bare base); noop, oracle, random; smollm2-135m, a folder or hub id, "
            "with @CAPABILITY\\[@vN] from "
            "the registry; provider/model (LiteLLM); vllm:URL#MODEL\\[@ADAPTER]."
        ),
    ] = "noop",
    trials: Annotated[int, typer.Option(min=1, max=MOST_TRIALS, help="Episodes per task.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST, help="Another seed gives other draws.")] = 0,
    user: Annotated[str | None, typer.Option(help="Simulated user: scripted, or litellm:MODEL.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first tasks of the split.")] = None,
    api_base: Annotated[str, typer.Option(help="Address of an OpenAI-compatible server.")] = "",
    api_key_variable: Annotated[str, typer.Option(help="Environment variable that holds its key.")] = "",
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="Default: 0 for API models, else the profile's.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest turn. Default: 2048 for API models, else the profile's.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Episodes at once, for models behind an API.")] = 8,
    max_cost: Annotated[float | None, typer.Option(min=0, help="Dollars that the evaluation may cost in all.")] = None,
    price: Annotated[str, typer.Option(help="PROMPT,SAMPLED dollars per million tokens, if LiteLLM has none.")] = "",
    user_price: Annotated[str, typer.Option(help="The same of the simulated user's model.")] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over instead of going on with what is stored.")] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Success of a policy on a split, with its interval, and always the no-op row. The same command goes on with what
    is owed. Exit 1 when episodes are without a result."""
    from tasks.measuring.figures import table
    from tasks.measuring.policy_names import PolicyOptions
    from tasks.measuring.targets import EvaluateRequest, evaluate_targets

    options = PolicyOptions(temperature, max_tokens, api_base, api_key_variable, _price("--price", price))
    by_user = _price("--user-price", user_price)
    request = EvaluateRequest(target, split, policy, trials, seed, user, limit, workers, max_cost, fresh, home, by_user)
    with result_alone():
        rows = evaluate_targets(request, options)
    printed([r.model_dump(mode="json") for r in rows], as_json, "\n".join(table(rows)))
    owed = [r for r in rows if r.owed]
    for r in owed:
        why = r.stopped or r.first_error
        typer.echo(f"incomplete: {r.policy} on {r.target}, {r.owed} episodes: {why}; run the command again", err=True)
    if owed:
        raise typer.Exit(1)


def _price(option: str, text: str) -> tuple[float, float] | None:
    from errors import ConfigurationError

    if not text:
        return None
    try:
        prompt, sampled = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigurationError(
            f"{option} {text!r} is not two numbers; write PROMPT,SAMPLED, such as 0.15,0.60"
        ) from None
    if not all(0 <= dollars < math.inf for dollars in (prompt, sampled)):
        raise ConfigurationError(f"{option} {text!r} is not a price; write dollars per million tokens, 0 or more")
    return prompt, sampled
