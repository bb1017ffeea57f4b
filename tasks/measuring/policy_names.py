"""Policies by name, as a person writes them on the command line.

noop, oracle, random             without a model
smollm2-135m, FOLDER, HUB/ID     the model as rounds play it, in this process or, with `policy.backend = "vllm"`, on the
                                 servers of the settings (`local:` before it where the name could be a provider's)
release[@N]                      what is live, or release N: its router chooses among its adapters, task by task
MODEL@CAPABILITY[@vN]            with an adapter from the registry: its champion, else its newest version, or version N
provider/model                   any model that LiteLLM reaches (`litellm:` before it where it is in doubt)
vllm:URL#MODEL[@ADAPTER]         a vLLM server's chat protocol, by its base address and the names that it serves
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import httpx

from environments.contract import Target, TargetTask
from errors import AdapterError, ConfigurationError, ProviderError
from models.adapters.files import RegisteredAdapter
from models.adapters.fingerprint import prove, read_fingerprint
from models.adapters.loading import load_folder
from models.policy import MessagePolicy, PolicyIdentity, Sampling, TokenPolicy, TrainablePolicy
from models.providers.chat_policy import ChatPolicy, ChatSettings
from models.providers.client import ModelClient
from models.providers.litellm_client import known_model
from models.renderer import Renderer
from models.scripted import NoopPolicy, OraclePolicy, RandomPolicy
from settings import Settings

if TYPE_CHECKING:  # torch takes seconds to import, and most policies do without
    from models.local.base import BaseModel

SCRIPTED: dict[str, Callable[[], MessagePolicy]] = {"noop": NoopPolicy, "oracle": OraclePolicy, "random": RandomPolicy}
EMBEDDED = "smollm2-135m"
BARE = "release@0"  # the bare base, as `compare` and `rollback` call it
Kind = Literal["scripted", "local", "release", "chat", "vllm"]
# An API model's turn, unless told otherwise; a local model takes what the profile says.
CHAT_TOKENS = 2048


@dataclass(frozen=True)
class PolicyName:
    """A policy's name, taken apart. `api_base` is a server's address."""

    text: str
    kind: Kind
    model: str
    adapter: str = ""
    api_base: str = ""


@dataclass(frozen=True)
class PolicyOptions:
    """How the policy samples (None: the kind's own default), and where an API model is."""

    temperature: float | None = None
    max_tokens: int | None = None
    api_base: str = ""
    api_key_variable: str = ""
    price: tuple[float, float] | None = None


@dataclass(frozen=True)
class LoadedPolicy:
    """A policy ready to play. `renderer` and `adapter` are a token policy's (`served` is the adapter's name in the
    registry), `context` is in tokens where it is known, `chat` is the policy once more if it is an API model's. A
    release has its number in `release` (0: the bare base), `choose`, which gives each task's adapter (None, or one of
    `adapters`), and `acting`, the identity of the whole. `close` ends threads and connections; a policy on servers
    takes its adapters from them."""

    name: PolicyName
    policy: TokenPolicy | MessagePolicy
    sampling: Sampling
    renderer: Renderer | None = None
    adapter: str | None = None
    served: str = ""
    window: int = 1
    context: int | None = None
    chat: ChatPolicy | None = None
    choose: Callable[[Sequence[TargetTask]], list[str | None]] | None = None
    adapters: tuple[str, ...] = ()
    acting: PolicyIdentity | None = None
    release: int | None = None
    close: Callable[[], None] = lambda: None

    @property
    def identity(self) -> PolicyIdentity:
        return self.acting or self.policy.identity(self.adapter)


def parse_policy(text: str, api_base: str = "") -> PolicyName:
    """Take a policy's name apart (see above). Raises `ConfigurationError` for one that cannot be meant."""
    if text in SCRIPTED:
        return PolicyName(text, "scripted", text)
    if text.partition("@")[0] == "release":
        return PolicyName(text, "release", "release")
    prefix, colon, rest = text.partition(":")
    if colon and prefix == "vllm":
        url, sharp, served = rest.partition("#")
        model, _, adapter = served.partition("@")
        if not sharp or not model or not url.startswith(("http://", "https://")):
            raise ConfigurationError(f"policy {text!r} names no server; write vllm:http://HOST:PORT#MODEL[@ADAPTER]")
        return PolicyName(text, "vllm", model, adapter, url.rstrip("/").removesuffix("/v1") + "/v1")
    if colon and prefix in ("litellm", "local") and not rest:
        raise ConfigurationError(f"policy {text!r} names no model; write {prefix}:MODEL")
    if colon and prefix == "litellm":
        return PolicyName(text, "chat", rest, "", api_base)
    if colon and prefix == "local":
        return _local(text, rest)
    if text.partition("@")[0] == EMBEDDED or Path(text.partition("@")[0]).is_dir():
        return _local(text, text)
    if known_model(text):
        return PolicyName(text, "chat", text, "", api_base)
    if api_base:  # a server that speaks OpenAI's protocol under a name of its own
        return PolicyName(text, "chat", f"openai/{text}", "", api_base)
    if "/" not in text:
        close = difflib.get_close_matches(text, [*SCRIPTED, "release", EMBEDDED], n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigurationError(
            f"policy {text!r} is neither a folder here nor a model that LiteLLM knows; {hint}A model of the Hugging "
            f"Face hub is written OWNER/NAME, or local:{text}"
        )
    return _local(text, text)


def _local(text: str, name: str) -> PolicyName:
    if Path(name).is_dir():
        return PolicyName(text, "local", name)
    model, at, adapter = name.partition("@")
    if not model or (at and not adapter):
        raise ConfigurationError(f"policy {text!r} is half a name; write MODEL or MODEL@CAPABILITY")
    return PolicyName(text, "local", model, adapter)


def load_policy(
    name: PolicyName, options: PolicyOptions, settings: Settings, target: Target, client: ModelClient
) -> LoadedPolicy:
    """The policy, after its files, adapter or server were checked. An API model's key, price and tools are
    left to `ChatPolicy.check`, which costs a call. Releases and adapters are those of `settings.target`, the name
    that `target` was asked for by. Raises `ConfigurationError`, `AdapterError` or `ProviderError`."""
    if name.kind == "scripted":
        return LoadedPolicy(name, SCRIPTED[name.model](), Sampling(0.0, 0))
    if name.kind == "release" and name.text == BARE:
        return replace(_load_token_policy(replace(name, model=settings.base_model), options, settings), release=0)
    if name.kind == "release":
        from tasks.measuring.release_policy import load_release

        return load_release(name, options, settings, target)
    if name.kind == "local":
        return _load_token_policy(name, options, settings)
    if name.kind == "vllm":
        from models.vllm.server import VllmServer
        from tasks.round.policies import check_awake

        with closing(VllmServer(name.api_base, name.model, seconds=10)) as server:
            check_awake(server, settings)
        return served_policy(name, options, client)
    sampling = _chat_sampling(options)
    chat = ChatSettings(
        name.model, name.api_base, options.api_key_variable, "", sampling.temperature, sampling.max_tokens,
        price=options.price,
    )  # fmt: skip
    return _chat(name, chat, sampling, client)


def served_policy(name: PolicyName, options: PolicyOptions, client: ModelClient) -> LoadedPolicy:
    """Any model that a vLLM server serves, as users of the server meet it: by the chat protocol, with the server's own
    template and tool parser. A round's own rendering, ids in and ids out, is `_load_token_policy`'s."""
    served = _served_models(name)
    asked = name.adapter or name.model
    if name.model not in served or asked not in served:
        missing, known = name.model if name.model not in served else asked, ", ".join(sorted(served)) or "nothing"
        raise ConfigurationError(f"the server at {name.api_base} does not serve {missing!r}; it serves {known}")
    sampling = _chat_sampling(options)
    context = served[name.model]
    chat = ChatSettings(
        f"openai/{asked}", name.api_base, options.api_key_variable, name.adapter, sampling.temperature,
        sampling.max_tokens, context=context, price=options.price or (0.0, 0.0),
    )  # fmt: skip
    return _chat(name, chat, sampling, client)


def _chat_sampling(options: PolicyOptions) -> Sampling:
    temperature = 0.0 if options.temperature is None else options.temperature
    return Sampling(temperature, options.max_tokens or CHAT_TOKENS)


def _chat(name: PolicyName, chat: ChatSettings, sampling: Sampling, client: ModelClient) -> LoadedPolicy:
    policy = ChatPolicy(chat, client)
    return LoadedPolicy(name, policy, sampling, context=policy.context, chat=policy, close=policy.close)


def _served_models(name: PolicyName) -> dict[str, int | None]:
    """Names that the server serves, with their context in tokens where it says so."""
    try:
        answer = httpx.get(f"{name.api_base}/models", timeout=10)
        answer.raise_for_status()
        return {str(row["id"]): row.get("max_model_len") for row in answer.json()["data"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as problem:
        raise ProviderError(
            f"the server at {name.api_base} does not list its models: {problem}; start it, or correct the address"
        ) from problem


def _load_token_policy(name: PolicyName, options: PolicyOptions, settings: Settings) -> LoadedPolicy:
    """A model as rounds play it: exact ids, the project's rendering, in this process or on vLLM servers."""
    from models.local.base import load_base
    from models.local.model_files import check_base
    from tasks.round.policies import check_policy, open_backend

    check_base(name.model, settings.cache)
    check_policy(settings)
    found = None if not name.adapter else registered_adapter(name.adapter, settings, settings.target)
    rollout = settings.rollout
    how = settings.dtype, settings.calls, rollout.rows, settings.cache, settings.devices.shard
    base = load_base(name.model, *how)
    policy = open_backend(settings, base).policy
    temperature = rollout.temperature if options.temperature is None else options.temperature
    loaded = LoadedPolicy(
        name, policy, Sampling(temperature, options.max_tokens or rollout.max_tokens), base.renderer,
        window=2 * policy.rows, context=policy.context, close=policy.close,
    )  # fmt: skip
    try:
        if found is None:
            return loaded
        return replace(loaded, adapter=_proven(policy, base, *found), served=found[0].served_name)
    except BaseException:
        loaded.close()
        raise


def _proven(policy: TrainablePolicy, base: BaseModel, adapter: RegisteredAdapter, folder: Path) -> str:
    """Load a registered adapter that fits the base and is live; the name to sample with. Raises `AdapterError`."""
    identity = base.identity
    trained_on = (adapter.tags.get("base", ""), adapter.tags.get("base_revision", ""))
    if trained_on != (identity.base, identity.revision):
        raise AdapterError(
            f"adapter {adapter.served_name} was trained on {trained_on[0]} (revision {trained_on[1]}), not on "
            f"{identity.base} ({identity.revision}); evaluate it on that model"
        )
    expected = read_fingerprint(adapter.tags, adapter.served_name)
    name = load_folder(policy, folder, adapter.capability, "evaluate", adapter.sha256)
    prove(policy, expected, name)
    return name


def registered_adapter(name: str, settings: Settings, target: str) -> tuple[RegisteredAdapter, Path]:
    """An adapter of a target by `CAPABILITY` (its champion, else its newest version) or `CAPABILITY@vN[-HASH]`, and its
    folder, hash checked. Raises `AdapterError` when there is none, with what there is."""
    from tasks.round.registry import open_registry

    registry = open_registry(settings, target)
    capability, at, version = name.partition("@")
    versions = registry.versions(capability)
    if at:
        found = next(
            (a for a in versions if version in (f"v{a.version}", a.version, a.served_name.split("@")[1])), None
        )
    else:
        found = registry.champion(capability) or (versions[-1] if versions else None)
    if found is None:
        known = [a.served_name for a in versions] or sorted(registry.champions())
        raise AdapterError(
            f"the registry at {registry.shown_uri} has no adapter {name!r} for {target}; "
            f"there are: {', '.join(known) or 'none with a champion'}"
        )
    return found, registry.download(found, settings.folder / "adapters")
