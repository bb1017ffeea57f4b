"""A scripted OpenAI-compatible server. It stands in for the analyst's model, which cannot run in tests: real HTTP, real
LiteLLM on the other side, and replies that are good, malformed, truncated, slow, refused, or no replies at all."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class ScriptedAnalyst:
    """`script(number, request) -> step` decides each answer; a step is a dict made by the functions below."""

    def __init__(self, script: Callable[[int, dict], dict]) -> None:
        self.requests: list[dict] = []
        self.running = self.most_running = 0
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(outer.requests)
                    outer.requests.append(request)
                    outer.running += 1
                    outer.most_running = max(outer.most_running, outer.running)
                step = script(number, request)
                time.sleep(step.get("seconds", 0))
                with lock:
                    outer.running -= 1
                body = json.dumps(step["body"]).encode() if not isinstance(step["body"], bytes) else step["body"]
                try:
                    self.send_response(step.get("status", 200))
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(body)))
                    for name, value in step.get("headers", {}).items():
                        self.send_header(name, value)
                    self.end_headers()
                    for i in range(0, len(body), step.get("piece", len(body)) or 1):
                        self.wfile.write(body[i : i + step.get("piece", len(body))])
                        self.wfile.flush()
                        time.sleep(step.get("pause", 0))
                except (BrokenPipeError, ConnectionResetError):
                    return

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()
        self.api_base = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def __enter__(self) -> "ScriptedAnalyst":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(timeout=5)


def good(value: object, prompt_tokens: int = 10, sampled_tokens: int = 5) -> dict:
    """A complete reply: `value` as JSON, or a text as it is."""
    return reply(value if isinstance(value, str) else json.dumps(value), "stop", prompt_tokens, sampled_tokens)


def truncated(text: str = '{"answer": "half a', sampled_tokens: int = 64) -> dict:
    """Cut at the token limit."""
    return reply(text, "length", 10, sampled_tokens)


def refused(text: str = "I cannot help with that.") -> dict:
    """A refusal in the protocol's own field."""
    step = reply("", "stop", 10, 5)
    step["body"]["choices"][0]["message"]["refusal"] = text
    return step


def slow(value: object, seconds: float) -> dict:
    """Nothing for a while."""
    return good(value) | {"seconds": seconds}


def trickling(value: object, pause: float) -> dict:
    """A byte at a time, so that no single read takes long."""
    return good(value) | {"piece": 1, "pause": pause}


def failed(status: int, message: str = "scripted failure", **headers: str) -> dict:
    """An HTTP error."""
    return {
        "status": status,
        "headers": headers,
        "body": {"error": {"message": message, "type": "scripted", "code": status}},
    }


def reply(content: str, finish_reason: str, prompt_tokens: int, sampled_tokens: int) -> dict:
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": content}}
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled_tokens,
        "total_tokens": prompt_tokens + sampled_tokens,
    }
    return {
        "body": {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "scripted",
            "choices": [choice],
            "usage": usage,
        }
    }


def in_turn(*steps: dict) -> Callable[[int, dict], dict]:
    """The steps in order, the last one for ever."""
    return lambda number, request: steps[min(number, len(steps) - 1)]
