"""Commands that serve what was learnt: the gateway, and blends of adapters for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.options import Home


def add_serving(app: typer.Typer) -> None:
    """Register the commands of this file."""
    for command in (serve, blend, key):
        app.command()(command)
    app.command("compose", hidden=True)(blend)  # the command's name in version 0.1


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback keys are needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8900,
    home: Home = None,
    target: Annotated[
        str | None, typer.Option(help="Whose release; by default the one that is set, else the newest round's.")
    ] = None,
    release: Annotated[
        int, typer.Option(min=0, help="Number of a release to serve, whichever is live. 0 follows the live one.")
    ] = 0,
    server: Annotated[
        list[str] | None,
        typer.Option(help="Address of a vLLM server; repeat for replicas. None: as policy.backend says."),
    ] = None,
    server_chat: Annotated[
        bool, typer.Option("--server-chat", help="Pass requests to servers as they came, not rendered as in training.")
    ] = False,
    mode: Annotated[str, typer.Option(help="auto, linear, retrieval, label, both, fixed or off.")] = "auto",
    fixed: Annotated[str, typer.Option(help="The member of mode fixed.")] = "",
    missing: Annotated[str, typer.Option(help="What a missing adapter means: base or 503.")] = "base",
    blend: Annotated[
        float,
        typer.Option(
            "--blend",
            "--compose",
            help="Use a published blend whose members have more than this probability together. 0: none.",
        ),
    ] = 0.0,
    keys: Annotated[
        Path | None, typer.Option(help="File with API keys: one a line, or .toml with names, scopes and quotas.")
    ] = None,
    deadline: Annotated[float, typer.Option(help="Seconds for a whole answer.")] = 120.0,
    concurrency: Annotated[int, typer.Option(help="Requests at once; more are told to come again.")] = 64,
    sample: Annotated[float, typer.Option(help="Share of conversations that is stored, 0 to 1.")] = 1.0,
    plain: Annotated[bool, typer.Option("--plain", help="Add no instructions of the target.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Where there is no round yet, wait for the first.")] = False,
) -> None:
    """One OpenAI-compatible endpoint in front of the base and the live release."""
    from models.serving.gateway.keys import Keys
    from models.serving.gateway.settings import GatewaySettings
    from settings import machine_settings

    wanted = GatewaySettings(
        missing=missing,
        deadline=deadline,
        most_requests=concurrency,
        sample=sample,
        blend=blend,
        keys=Keys.read(keys, machine_settings().gateway_keys),
    )
    from flows.serve import run_gateway
    from tasks.serving.gateway import Serving
    from tasks.serving.releases import Routing

    serving = Serving(
        servers=tuple(server or ()),
        rendered=not server_chat,
        plain=plain,
        routing=Routing(mode, fixed),
        release=release,
    )
    run_gateway(home, target, serving, wanted, host, port, wait)


def blend(
    parts: Annotated[
        list[str], typer.Argument(help="Members of the live release and weights, like refund_payment=0.5.")
    ],
    home: Home = None,
    target: Annotated[str | None, typer.Option(help="Whose release; by default as in serve.")] = None,
    most_rank: Annotated[int, typer.Option(min=0, help="Bound on the rank; 0 keeps the sum exact.")] = 0,
) -> None:
    """Publish a weighted sum of members as an adapter of its own, in a candidate release, for `serve --blend`."""
    from tasks.serving.blends import publish_blend

    row, name = publish_blend(home, target, parts, most_rank)
    typer.echo(
        f"{name} is in release {row.number} of {row.target}, a candidate: try it with 'trace-agent serve --release "
        f"{row.number} --blend 0.6', make it live with 'trace-agent promote {row.number}'"
    )


def key(
    name: Annotated[str, typer.Argument(help="Who it is for.")],
    scope: Annotated[list[str] | None, typer.Option(help="chat, feedback or admin; repeat. None: all.")] = None,
    requests_per_minute: Annotated[int, typer.Option(min=0, help="0: no limit.")] = 0,
    tokens_per_day: Annotated[int, typer.Option(min=0, help="0: no limit.")] = 0,
) -> None:
    """Make a key of the gateway: print what goes into its key file, and on stderr the key itself, this once."""
    import secrets

    from models.serving.gateway.keys import entry

    made = secrets.token_urlsafe(32)
    quotas = {"requests_per_minute": requests_per_minute, "tokens_per_day": tokens_per_day}
    typer.echo(entry(name, made, {"scopes": list(scope or ()), **quotas}))
    typer.echo(f"the key of {name}, shown this once: {made}", err=True)
