"""The gateway's keys: who may ask for what, and how much. Changed without a restart, by changing the file.

A file that ends in `.toml` has a table for each name; a rotation puts the new key beside the old, then takes that out:

    [anna]
    sha256 = ["64 hexadecimal digits"]  # of her keys; or key = "..." itself ('trace-agent key anna' makes both)
    scopes = ["chat", "feedback"]       # of chat, feedback, admin; all when left out
    requests_per_minute = 60            # 0 or left out: no limit
    tokens_per_day = 1000000            # read and sampled, by UTC day, since the gateway was started

Any other file has a key a line, without a name, that may do everything; a # at its beginning, or behind a blank, begins
a comment.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import re
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from errors import ConfigurationError
from models.serving.openai_api.errors import ApiError
from models.serving.openai_api.requests import ChatRequest

logger = logging.getLogger("trace.gateway")
CHAT, FEEDBACK, ADMIN = SCOPES = ("chat", "feedback", "admin")
SHORTEST_KEY = 16
# How often the file is looked at.
LOOK_SECONDS = 1.0
MINUTE, DAY = 60.0, 86_400
# Tokens that are held for an answer whose request names no limit, where nobody knows how long it may become. When to
# ask again for what others hold.
UNNAMED, BUSY_SECONDS = 128, 5
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_COMMENT = re.compile(r"(?:^|\s)#.*")  # a # within a key is one of its characters


@dataclass(frozen=True)
class Key:
    """A name with its keys, kept as SHA-256 hashes: neither a log nor a traceback can show one."""

    name: str
    digests: tuple[bytes, ...]
    scopes: frozenset[str] = frozenset(SCOPES)
    requests_per_minute: int = 0
    tokens_per_day: int = 0


# Who asks where no keys are asked for.
OPEN = Key("", ())


class _Table(BaseModel):
    """A name's table in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: SecretStr | list[SecretStr] = []
    sha256: str | list[str] = []
    scopes: list[str] = list(SCOPES)
    requests_per_minute: int = Field(0, ge=0)
    tokens_per_day: int = Field(0, ge=0)


@dataclass
class _Used:
    """What a name has used: moments of its requests of the last minute, tokens of a day. `held` are the tokens that its
    requests in flight may still use."""

    requests: deque[float] = field(default_factory=deque)
    day: int = 0
    tokens: int = 0
    held: int = 0


class Keys:
    """The keys that are in force. None at all means that none is asked for."""

    def __init__(self, keys: Iterable[Key] = (), file: Path | None = None) -> None:
        self._given, self._file = tuple(keys), file
        self._of_file: tuple[Key, ...] = ()
        self._used: dict[str, _Used] = {}
        self._looked, self._mark = 0.0, self._stamp()
        if file is not None:
            self._of_file = read_file(file)
            _check_names([*self._given, *self._of_file])

    @classmethod
    def of(cls, keys: Iterable[str]) -> Keys:
        """Keys without names. Raises `ConfigurationError` for one that is too short."""
        return cls(_unnamed(keys))

    @classmethod
    def read(cls, file: Path | None, given: SecretStr) -> Keys:
        """Keys of `file` and those `given` by the setting `gateway_keys` (commas between). Raises `ConfigurationError`,
        which never shows a key."""
        return cls(_unnamed(given.get_secret_value().split(",")), file)

    @property
    def known(self) -> tuple[Key, ...]:
        """All keys in force."""
        return (*self._given, *self._of_file)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """The hashes of all keys in force."""
        return tuple(digest for key in self.known for digest in key.digests)

    def who(self, authorization: str) -> Key | None:
        """Who sent the header `Authorization: Bearer KEY`; `OPEN` when no keys are asked for, None when the key is
        wrong. Takes equally long for every wrong key."""
        self._look()
        if not self.digests:
            return OPEN
        scheme, _, sent = authorization.partition(" ")
        digest = hashlib.sha256(sent.strip().encode()).digest()
        compared = [(hmac.compare_digest(digest, known), key) for key in self.known for known in key.digests]
        right = [key for same, key in compared if same]
        return right[0] if right and scheme.lower() == "bearer" else None

    def admit(self, key: Key, now: Callable[[], float] = time.time) -> Callable[[], None]:
        """Count a request that asks a model; what is returned takes that back, for one that is refused because of
        others. Raises `ApiError` (429) when a quota is used up."""
        used, at = self._used.setdefault(key.name, _Used()), now()
        # What lies ahead was counted before the clock was set back: it would fill the minute until the clock is there.
        while used.requests and not at - MINUTE < used.requests[0] <= at:
            used.requests.popleft()
        if key.requests_per_minute and len(used.requests) >= key.requests_per_minute:
            wait = used.requests[0] + MINUTE - at
            raise _used_up(f"{key.requests_per_minute} requests a minute", wait)
        if key.tokens_per_day and used.day == int(at // DAY) and used.tokens >= key.tokens_per_day:
            raise _used_up(f"{key.tokens_per_day} tokens a day", DAY - at % DAY)
        used.requests.append(at)

        def take_back() -> None:
            with contextlib.suppress(ValueError):  # a minute has passed
                used.requests.remove(at)

        return take_back

    def hold(self, name: str, tokens: int, now: Callable[[], float] = time.time) -> Callable[[], None]:
        """Keep so many tokens of a name's quota for a request until what is returned is called, however the request
        ends: what it has really used is spent by then. Raises `ApiError` (429) when, with what is held for others, they
        are more than is left. A request that is alone is let while anything is left: how long its answer may become is
        no reason to refuse it, and one answer is the most by which a quota is passed."""
        used, at = self._used.setdefault(name, _Used()), now()
        spent = used.tokens if used.day == int(at // DAY) else 0
        most = next((key.tokens_per_day for key in self.known if key.name == name), 0)
        if most and spent >= most:
            raise _used_up(f"{most} tokens a day", DAY - at % DAY)
        if most and used.held and spent + used.held + tokens > most:
            raise ApiError(
                429,
                f"this key may use {most} tokens a day, and its requests in flight may need what is left; ask again "
                "when one has ended, or for fewer tokens (max_tokens)",
                code="quota_exceeded",
                retry_after=BUSY_SECONDS,
            )
        used.held += tokens

        def give_back() -> None:
            used.held -= tokens

        return give_back

    def spend(self, name: str, tokens: int, now: Callable[[], float] = time.time) -> None:
        """Count the tokens of an answer."""
        used, day = self._used.setdefault(name, _Used()), int(now() // DAY)
        used.tokens = tokens + (used.tokens if used.day == day else 0)
        used.day = day

    def _look(self) -> None:
        """Read the file again when it was changed. What cannot be read, or holds no key, changes nothing: a mistake
        opens the gateway to nobody and shuts nobody out."""
        if self._file is None or time.monotonic() < self._looked + LOOK_SECONDS:
            return
        self._looked, mark = time.monotonic(), self._stamp()
        if mark == self._mark:
            return
        self._mark = mark
        try:
            found = read_file(self._file)
            _check_names([*self._given, *found])
        except ConfigurationError as problem:
            logger.error("the keys from before stay in force: %s", problem)
            return
        self._of_file = found
        logger.info("the keys of %s were read again: %s", self._file, ", ".join(key.name for key in found))

    def _stamp(self) -> tuple[int, ...]:
        """What changes when the file does; () while it cannot be looked at."""
        try:
            found = self._file.stat() if self._file else None
        except OSError:
            return ()
        return (found.st_mtime_ns, found.st_size, found.st_ino) if found else ()


def most_tokens(asked: ChatRequest, ahead: int = 0, longest: int = 0) -> int:
    """About what a request may use: the `ahead` tokens of the prompt that the gateway puts before it, a token for every
    four bytes of it, and the longest answers that it allows; `longest` is that of one that names no limit (0: not
    known)."""
    return ahead + asked.size // 4 + asked.answers * (asked.max_tokens or longest or UNNAMED)


def read_file(file: Path) -> tuple[Key, ...]:
    """The keys of a file. Raises `ConfigurationError`, which never shows a key, when it holds none or is wrong."""
    try:
        text = file.read_text("utf-8-sig")  # some editors put a mark at the beginning
        tables = tomllib.loads(text) if file.suffix == ".toml" else None
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigurationError(f"key file {file} cannot be read ({type(problem).__name__}); name another") from None
    except tomllib.TOMLDecodeError as problem:
        where = re.search(r"\(at .*\)", str(problem))  # the rest might show what stands there
        raise ConfigurationError(f"key file {file} is not TOML {where.group() if where else ''}; correct it") from None
    if tables is None:
        keys = _unnamed(_COMMENT.sub("", line) for line in text.splitlines())
    else:
        keys = tuple(_named(file, name, table) for name, table in tables.items())
    if not keys:
        raise ConfigurationError(f"key file {file} holds no key; write one a line, or a table for each name")
    return keys


def entry(name: str, key: str, given: Mapping[str, Any]) -> str:
    """The table of a new key in a key file, with its hash alone. Raises `ConfigurationError` for what no file may
    hold."""
    lines = {"sha256": [hashlib.sha256(key.encode()).hexdigest()], **{k: v for k, v in given.items() if v}}
    _named(Path("the new table"), name, lines)
    values = {k: str(v).replace("'", '"') if isinstance(v, list) else str(v) for k, v in lines.items()}
    return "\n".join([f"[{name}]", *(f"{k} = {v}" for k, v in values.items())])


def _named(file: Path, name: str, table: Any) -> Key:
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{file}: {name[:40]!r} is no name of a key; use up to 64 lower-case letters, digits, _ and -"
        )
    try:
        given = _Table.model_validate(table)
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigurationError(f"{file}: [{name}] {where}: {first['msg']}; correct it") from None
    wrong = [scope for scope in given.scopes if scope not in SCOPES]
    if wrong or not given.scopes:
        raise ConfigurationError(f"{file}: [{name}] scopes = {given.scopes}; choose from {', '.join(SCOPES)}")
    plain = given.key if isinstance(given.key, list) else [given.key]
    hashes = given.sha256 if isinstance(given.sha256, list) else [given.sha256]
    if any(not re.fullmatch("[0-9a-f]{64}", text) for text in hashes):
        raise ConfigurationError(f"{file}: [{name}] sha256 holds something else than 64 hexadecimal digits; correct it")
    digests = (*(_digest(key.get_secret_value()) for key in plain), *(bytes.fromhex(text) for text in hashes))
    if not digests:
        raise ConfigurationError(f"{file}: [{name}] has neither key nor sha256; 'trace-agent key {name}' makes one")
    return Key(name, digests, frozenset(given.scopes), given.requests_per_minute, given.tokens_per_day)


def _unnamed(keys: Iterable[str]) -> tuple[Key, ...]:
    """Keys that may do everything; each is called by the beginning of its hash, which does not tell it."""
    digests = dict.fromkeys(_digest(key.strip()) for key in keys if key.strip())
    return tuple(Key(digest.hex()[:8], (digest,)) for digest in digests)


def _digest(key: str) -> bytes:
    if len(key) < SHORTEST_KEY:
        raise ConfigurationError(f"a gateway key has fewer than {SHORTEST_KEY} characters; take a random one")
    return hashlib.sha256(key.encode()).digest()


def _check_names(keys: Iterable[Key]) -> None:
    """One key belongs to one name: else whose quota it uses would be an accident."""
    owner: dict[bytes, str] = {}
    for key in keys:
        for digest in key.digests:
            if owner.setdefault(digest, key.name) != key.name:
                raise ConfigurationError(f"{owner[digest]} and {key.name} have the same key; give each its own")


def _used_up(what: str, wait: float) -> ApiError:
    return ApiError(429, f"this key may use {what}, and has", code="quota_exceeded", retry_after=max(1, round(wait)))
