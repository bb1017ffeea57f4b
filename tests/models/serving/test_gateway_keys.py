"""Keys of the gateway: names, scopes, quotas, and changes without a restart."""

from __future__ import annotations

import hashlib
import logging
import time
import tomllib
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import requests
from pydantic import SecretStr
from typer.testing import CliRunner

from environments.contract import Message, Prompt
from errors import ConfigurationError, StoreError
from models.adapters.files import RegisteredAdapter
from models.adapters.registry import Registry
from models.renderer import Renderer
from models.serving.fleet.lifecycle import Reconciler
from models.serving.fleet.releases import answered
from models.serving.gateway import keys as keys_file
from models.serving.gateway.gateway import Gateway
from models.serving.gateway.keys import DAY, OPEN, Keys, entry, most_tokens
from models.serving.gateway.settings import GatewaySettings, Preset
from models.serving.openai_api.errors import ApiError
from models.serving.openai_api.requests import parse_chat, parse_completion
from models.serving.upstreams.http import HttpUpstream
from models.serving.upstreams.pool import Pool, Servers
from models.serving.upstreams.rendered import RenderedUpstream
from tests.models.serving.gateway_running import KEY, Running, built, error, run
from tests.models.serving.gateway_servers import HandMadeFleet, serving

ANNA, BOB, EVE = "anna-has-this-long-key", "bob-has-another-long-key", "eve-has-a-third-long-key"
REGISTRY = "anna:s3cret@127.0.0.1:1"


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is looked at with every request."""
    monkeypatch.setattr(keys_file, "LOOK_SECONDS", 0.0)


def asked(running: Running, key: str, path: str = "/v1/models", **given: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    if path == "/v1/chat/completions":
        given["json"] = {"model": "trace", "messages": [{"role": "user", "content": "x"}]}
    method = "POST" if "json" in given else "GET"
    return httpx.request(method, f"{running.url}{path}", headers=headers, timeout=60, trust_env=False, **given)


def test_a_key_may_do_what_its_scopes_say(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        f'[anna]\nkey = "{ANNA}"\nscopes = ["chat"]\n[bob]\nsha256 = "{hashed(BOB)}"\nscopes = ["admin"]\n'
        f'[eve]\nkey = ["{EVE}"]\n'
    )
    allowed = {
        ANNA: {"/v1/models": 200, "/v1/chat/completions": 200, "/status": 403, "/metrics": 403, "/v1/feedback": 403},
        BOB: {"/v1/models": 403, "/v1/chat/completions": 403, "/status": 200, "/metrics": 200, "/v1/feedback": 403},
        # Everything; there is no log, so feedback finds no conversation.
        EVE: {"/v1/models": 200, "/v1/chat/completions": 200, "/status": 200, "/metrics": 200, "/v1/feedback": 404},
    }
    with run(keys=Keys(file=file)) as running:
        for key, paths in allowed.items():
            for path, status in paths.items():
                given = {"json": {"conversation": "c", "success": True}} if path == "/v1/feedback" else {}
                assert asked(running, key, path, **given).status_code == status, (key, path)
        assert error(asked(running, ANNA, "/status")) == {
            "message": "this key may not do that: it needs the scope admin", "type": "permission_error", "param": None,
            "code": "insufficient_scope",
        }  # fmt: skip
        page = asked(running, BOB, "/metrics").text
        assert 'trace_gateway_key_requests_total{key="anna",outcome="refused"} 4.0' in page
        assert 'trace_gateway_key_requests_total{key="anna",outcome="admitted"} 2.0' in page
        assert not any(key in page for key in allowed)


def test_requests_beyond_the_quota_are_told_when_to_come_again() -> None:
    keys, now = Keys(), [1000.0]
    key = keys_file.Key("anna", (), requests_per_minute=2)
    for _ in range(2):
        keys.admit(key, lambda: now[0])
        now[0] += 10
    with pytest.raises(ApiError, match="2 requests a minute") as refused:
        keys.admit(key, lambda: now[0])
    assert (refused.value.status, refused.value.code) == (429, "quota_exceeded")
    assert refused.value.headers == {"retry-after": "40"}
    keys.admit(keys_file.Key("bob", (), requests_per_minute=2), lambda: now[0])
    now[0] += 41  # the first is a minute old
    keys.admit(key, lambda: now[0])
    with pytest.raises(ApiError):
        keys.admit(key, lambda: now[0])


def test_a_clock_that_is_set_back_leaves_no_key_out() -> None:
    keys, key = Keys(), keys_file.Key("anna", (), requests_per_minute=2)
    for at in (7200.0, 7201.0, 3600.0, 3601.0):
        keys.admit(key, lambda at=at: at)  # type: ignore[misc]
    with pytest.raises(ApiError):
        keys.admit(key, lambda: 3602.0)


def test_tokens_are_counted_by_day() -> None:
    keys, key = Keys(), keys_file.Key("anna", (), tokens_per_day=100)
    noon = 20_000.5 * DAY
    keys.spend("anna", 60, lambda: noon)
    keys.admit(key, lambda: noon)
    keys.spend("anna", 60, lambda: noon)
    with pytest.raises(ApiError, match="100 tokens a day") as refused:
        keys.admit(key, lambda: noon)
    assert refused.value.headers == {"retry-after": str(DAY // 2)}
    keys.admit(key, lambda: noon + DAY)
    keys.spend("anna", 1, lambda: noon + DAY)
    keys.admit(key, lambda: noon + DAY)


def test_answers_of_a_model_use_the_quota_over_http(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[anna]\nkey = "{ANNA}"\ntokens_per_day = 1\n[bob]\nkey = "{BOB}"\nrequests_per_minute = 1\n')
    with run(keys=Keys(file=file)) as running:
        for key in (ANNA, BOB):
            assert asked(running, key, "/v1/chat/completions").status_code == 200
            refused = asked(running, key, "/v1/chat/completions")
            assert (refused.status_code, error(refused)["code"]) == (429, "quota_exceeded")
            assert int(refused.headers["retry-after"]) >= 1
            assert asked(running, key, "/v1/models").status_code == 200, "looking uses no quota"


def test_requests_at_once_share_what_is_left_of_the_quota(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[anna]\nkey = "{ANNA}"\ntokens_per_day = 8\n')  # as many as an answer here has
    with run(keys=Keys(file=file)) as running, ThreadPoolExecutor(20) as pool:
        running.stub.delay = 0.5
        answers = list(pool.map(lambda _: asked(running, ANNA, "/v1/chat/completions"), range(20)))
        assert [a.status_code for a in answers].count(200) == 1, "one is let, however long its answer may become"
        refused = [a for a in answers if a.status_code != 200]
        assert {(a.status_code, error(a)["code"]) for a in refused} == {(429, "quota_exceeded")}
        assert str(keys_file.BUSY_SECONDS) in {a.headers["retry-after"] for a in refused}
        assert running.stub.counts["asked"] == 1


@pytest.mark.parametrize("tokens", [0, 8])  # the one that is being answered has the gateway's only place, or the rest
def test_requests_that_are_refused_because_of_others_use_no_quota(tmp_path: Path, tokens: int) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[anna]\nkey = "{ANNA}"\nrequests_per_minute = 3\ntokens_per_day = {10 * tokens}\n')
    with run(keys=Keys(file=file), most_requests=9 if tokens else 1) as running, ThreadPoolExecutor(1) as pool:
        running.stub.delay = 1.0
        first = pool.submit(asked, running, ANNA, "/v1/chat/completions")
        while not running.stub.counts["asked"]:
            time.sleep(0.01)
        codes = [asked(running, ANNA, "/v1/chat/completions").status_code for _ in range(4)]
        assert (codes, first.result().status_code) == ([429] * 4, 200)
        running.stub.delay = 0.0
        codes = [asked(running, ANNA, "/v1/chat/completions").status_code for _ in range(3)]
        assert codes == [200, 200, 429]


def test_every_end_of_a_request_gives_back_what_was_held_for_it() -> None:
    keys = Keys([keys_file.Key("anna", (hashlib.sha256(KEY.encode()).digest(),), tokens_per_day=1000)])

    def held() -> int:
        return keys._used["anna"].held

    with run(keys=keys) as running:
        assert running.chat("x", max_tokens=900).status_code == 200
        assert "[DONE]" in running.chat("x", stream=True).text
        assert running.chat("fail").status_code >= 500
        assert running.chat("fail", stream=True).status_code >= 500
        assert running.chat("x", model="nobody").status_code == 404
        assert running.chat("x", temperature="hot").status_code == 400
        for text, more in (("stall", {}), ("stall", {"stream": True}), ("drip", {"stream": True, "n": 3})):
            sent = {"model": "trace", "messages": [{"role": "user", "content": text}], **more}
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(
                    f"{running.url}/v1/chat/completions", json=sent, timeout=0.5, trust_env=False,
                    headers={"authorization": f"Bearer {KEY}"},
                )  # fmt: skip
            end = time.monotonic() + 20
            while held() and time.monotonic() < end:
                time.sleep(0.01)
            assert held() == 0, text
        assert keys._used["anna"].tokens > 16
        assert running.gateway.in_flight == 0


def test_a_request_is_held_for_at_its_longest_and_alone_it_is_let() -> None:
    keys = Keys([keys_file.Key("anna", (b"x",), tokens_per_day=1000)])
    chat = {"model": "trace", "messages": [{"role": "user", "content": "x"}]}
    assert most_tokens(parse_chat(chat, 400)) == 100 + keys_file.UNNAMED
    assert most_tokens(parse_chat(chat | {"max_tokens": 50, "n": 2}, 400)) == 200
    longest = {"max_tokens": 500, "max_completion_tokens": 50}  # the latter is of chats alone
    assert most_tokens(parse_chat(chat | longest, 400)) == 150
    assert most_tokens(parse_completion({"model": "trace", "prompt": "x"} | longest, 400)) == 600
    first = keys.hold("anna", 5000)
    with pytest.raises(ApiError, match="requests in flight may need what is left"):
        keys.hold("anna", 1)
    first()
    several = [keys.hold("anna", 400) for _ in range(2)]
    with pytest.raises(ApiError):
        keys.hold("anna", 400)
    keys.hold("bob", 400)
    several.pop()()
    keys.spend("anna", 400)
    several.append(keys.hold("anna", 200))
    keys.spend("anna", 600)
    with pytest.raises(ApiError, match="and has"):
        keys.hold("anna", 1)


@pytest.mark.parametrize("answers", [0, -1, 4.0, "4", True, 1.5, [2]])
def test_how_many_answers_are_asked_for_is_a_whole_number(answers: Any) -> None:
    """A server behind the gateway may take 4.0 and "4" for 4, where the quota would hold one answer."""
    with pytest.raises(ApiError, match="give a whole number from 1") as refused:
        parse_chat({"model": "trace", "messages": [{"role": "user", "content": "x"}], "n": answers})
    assert (refused.value.status, refused.value.body["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("rendered", [False, True])
def test_what_is_put_before_a_request_is_held_for_it(tiny_tokenizer: Any, rendered: bool) -> None:
    preset = Preset("shop", Prompt("You work in a shop. " * 40, ({"type": "function", "function": {"name": "f"}},)))
    renderer = Renderer(tiny_tokenizer)
    upstream: Any = HttpUpstream(Pool(Servers(["http://127.0.0.1:1"])), "base")
    if rendered:
        upstream = RenderedUpstream(SimpleNamespace(), renderer, longest=200)  # type: ignore[arg-type]
    gateway = Gateway(GatewaySettings("shop"), upstream, HandMadeFleet(), preset=preset)
    user, system = {"role": "user", "content": "x"}, {"role": "system", "content": "Be brief."}
    behind, own = (
        gateway.most_tokens(parse_chat({"model": "trace", "messages": m}, 400)) for m in ([user], [system, user])
    )
    assert own == 100 + (200 if rendered else keys_file.UNNAMED)
    if rendered:
        assert behind - own == len(renderer.start(preset.prompt, [Message("user", "")]).ids) > 100
    else:
        assert behind - own > 200
    assert gateway.most_tokens(parse_completion({"model": "trace", "prompt": "x"}, 400)) == own
    asked = parse_chat({"model": "trace", "messages": [system, user], "max_tokens": 50, "n": 3})
    assert gateway.most_tokens(asked) == 150


@pytest.mark.parametrize("told", [False, True])
def test_a_stream_uses_the_quota_and_tells_its_tokens_only_to_a_client_that_asks(tmp_path: Path, told: bool) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[anna]\nkey = "{ANNA}"\ntokens_per_day = 8\n[bob]\nkey = "{BOB}"\n')
    options = {"stream_options": {"include_usage": True}} if told else {}
    with run(keys=Keys(file=file)) as running:
        sent: Any = {"stream": True, "headers": {"authorization": f"Bearer {ANNA}"}, **options}
        answer = running.chat("x", **sent)
        assert "data: [DONE]" in answer.text
        assert ("usage" in answer.text) is told
        refused = running.chat("x", **sent)
        assert (refused.status_code, error(refused)["code"]) == (429, "quota_exceeded")
        page = asked(running, BOB, "/metrics").text
        assert 'trace_gateway_tokens_total{kind="prompt"} 5.0' in page
        assert 'trace_gateway_tokens_total{kind="completion"} 3.0' in page


@pytest.mark.usefixtures("at_once")
def test_a_key_is_rotated_without_a_restart_and_keeps_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, new = tmp_path / "keys.toml", "anna-has-a-newer-long-key"
    file.write_text(f'[anna]\nkey = "{ANNA}"\n[bob]\nkey = "{BOB}"\n')
    with run(keys=Keys(file=file)) as running, caplog.at_level(logging.INFO, "trace.gateway"):
        keys = running.gateway.settings.keys
        for held, answers in (
            (f'["{ANNA}", "{new}"]', {ANNA: 200, new: 200, BOB: 401}),
            (f'["{new}"]', {ANNA: 401, new: 200, BOB: 401}),
        ):
            file.write_text(f"[anna]\nkey = {held}\n")
            assert {key: asked(running, key).status_code for key in answers} == answers
            who = keys.who(f"Bearer {new}")
            assert who is not None
            assert who.name == "anna"
    assert "were read again: anna" in caplog.text
    assert not any(key in caplog.text for key in (ANNA, new, BOB))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("broken", ["", "# none\n", "[anna\n", '[anna]\nkey = "short"\n', None])
def test_a_mistake_in_the_file_changes_nothing_and_is_said(
    tmp_path: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[anna]\nkey = "{ANNA}"\n')
    keys = Keys(file=file)
    if broken is None:
        file.unlink()
    else:
        file.write_text(broken)
    for _ in range(2):
        assert keys.who(f"Bearer {ANNA}") is not None
        assert keys.who("Bearer something-else-that-is-long") is None, "never open to all"
    assert caplog.text.count("the keys from before stay in force") == 1
    file.write_text(f'[anna]\nkey = "{EVE}"\n')
    assert keys.who(f"Bearer {ANNA}") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ('[Anna B]\nkey = "x"', "TOML"),
        (f'["Anna B"]\nkey = "{ANNA}"', "'Anna B' is no name"),
        ('[anna]\nkey = "short"', "fewer than 16"),
        (f'[anna]\nkey = "{ANNA}"\nscopes = ["root"]', r"scopes = \['root'\]; choose from chat, feedback, admin"),
        (f'[anna]\nkey = "{ANNA}"\nscopes = []', "choose from"),
        (f'[anna]\nkey = "{ANNA}"\nrequests_per_minute = -1', r"\[anna\] requests_per_minute"),
        (f'[anna]\nkey = "{ANNA}"\nquota = 3', r"\[anna\] quota"),
        ('[anna]\nsha256 = "abc"', "64 hexadecimal"),
        ("[anna]\n", "neither key nor sha256"),
        ("anna = 3\n", r"\[anna\]"),
        (f'[anna]\nkey = "{ANNA}"\n[bob]\nkey = "{ANNA}"', "anna and bob have the same key"),
        (f'[anna]\nkey = "{ANNA}', "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_before_anything_is_served(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=words) as refused:
        Keys.read(file, SecretStr(""))
    assert ANNA not in str(refused.value)
    assert refused.value.__cause__ is None


def test_lines_and_the_variable_go_on_as_before(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    odd = "#a-key-with#a-sign"  # its beginning alone would be long enough
    file.write_text(f"{ANNA}  # of anna\n# nobody's\n{BOB}\nx{odd}\n", "utf-8-sig")  # as some editors begin a file
    keys = Keys.read(file, SecretStr(f"{EVE},"))
    assert keys.who(f"bearer x{odd[: odd.rindex('#')]}") is None
    for key in (ANNA, BOB, EVE, f"x{odd}"):
        who = keys.who(f"bearer {key}")
        assert who is not None
        assert (who.name, len(who.scopes)) == (hashed(key)[:8], 3)
    assert keys.who(f"Basic {ANNA}") is None
    assert Keys().who("") is OPEN
    assert not any(key in repr(keys.known) for key in (ANNA, BOB, EVE))


def test_a_new_key_is_shown_once_and_stored_as_a_hash(tmp_path: Path) -> None:
    from flows.cli.main import app

    asked_for = ["key", "anna", "--scope", "chat", "--requests-per-minute", "60"]
    done = CliRunner().invoke(app, asked_for)
    assert done.exit_code == 0, done.output
    made = done.stderr.rpartition(" ")[2].strip()
    assert made not in done.stdout
    assert tomllib.loads(done.stdout) == {
        "anna": {"sha256": [hashed(made)], "scopes": ["chat"], "requests_per_minute": 60}
    }
    (tmp_path / "keys.toml").write_text(done.stdout)
    who = Keys.read(tmp_path / "keys.toml", SecretStr("")).who(f"Bearer {made}")
    assert who is not None
    assert (who.name, who.scopes, who.requests_per_minute) == ("anna", {"chat"}, 60)
    with pytest.raises(ConfigurationError, match="choose from"):
        entry("anna", made, {"scopes": ["root"]})


def answers_403(_: Registry) -> None:
    """What MLflow lets through when a server refuses to list an artifact."""
    answer = requests.Response()
    answer.status_code, answer.reason, answer.url = 403, "Forbidden", f"http://{REGISTRY}/api/artifacts"
    answer.raise_for_status()


@pytest.mark.parametrize("asking", [lambda registry: registry.versions("refund"), answers_403])
def test_the_registrys_password_is_in_no_link_error_log_or_status(
    asking: Callable[[Registry], object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    registry = Registry(f"http://{REGISTRY}", "shop")
    adapter = RegisteredAdapter("trace-shop-refund", "3", "refund", "ab" * 32, "m-1", "", {})
    assert registry.link(adapter) == "http://127.0.0.1:1/#/models/trace-shop-refund/versions/3"
    with pytest.raises(StoreError, match=r"the registry does not answer: .*http://127.0.0.1:1/api/") as caught:
        answered(lambda: asking(registry))
    told = "".join(traceback.format_exception(caught.value))
    app, fleet, _ = built("http://127.0.0.1:1")
    monkeypatch.setattr(fleet, "follow", lambda: answered(lambda: asking(registry)))
    app.reconciler = Reconciler(fleet)
    with serving(app) as url:
        end = time.monotonic() + 20
        while not app.reconciler.problem and time.monotonic() < end:
            time.sleep(0.01)
        shown = httpx.get(f"{url}/status", headers={"authorization": f"Bearer {KEY}"}, trust_env=False).text
    assert "the registry does not answer" in shown
    assert "the registry does not answer" in caplog.text
    assert not [text for text in (told, shown, caplog.text) if "s3cret" in text]
