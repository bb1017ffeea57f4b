"""The process inside the sandbox: takes a generated module and answers calls of its functions over a pipe.

`environments.sandbox.workers` runs it as `python -I -S -B worker_process.py`; it imports the standard library only
and knows nothing of the project. Frames on standard input and output are a 4-byte big-endian length and that many
bytes of JSON. The first frame carries the limits and the system-call filter: the worker imports what modules may use,
applies limits and filter to itself and says "ready". The second carries the module, whose first line runs only then.
After that each frame {"id", "function", "arguments"} is answered by {"id", "value"} or {"id", "error"}, with the
seconds of processor time that it took (`used`). Everything it writes is data from an untrusted process: the other side
checks it.
"""

import base64
import ctypes
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
import types

_HEADER = 4


class _Nowhere:
    """What a module prints goes nowhere: the pipe is for answers."""

    encoding = "utf-8"

    def write(self, text):
        return len(text)

    def flush(self):
        return None


def _read(count):
    parts = []
    while count:
        part = os.read(0, min(count, 1 << 20))
        if not part:
            os._exit(0)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _receive():
    return json.loads(_read(int.from_bytes(_read(_HEADER), "big")))


def _send(value, limit):
    body = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > limit:
        raise ValueError(f"the answer has {len(body)} bytes, more than {limit}")
    body = len(body).to_bytes(_HEADER, "big") + body
    while body:
        body = body[os.write(1, body) :]


def _limit(memory_bytes):
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 3),
    ):
        resource.setrlimit(kind, (value, value))


def _die_with(parent):
    """Be killed with the process that started this one, also in the middle of a module that loops (prctl:
    PR_SET_PDEATHSIG = 1). Where it died before that, nobody writes the next frame, and `_read` ends this process; or
    whoever has its pipe now is not `parent`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)


def _watch():
    """Go on in a child, with which this process ends. It also ends, and the child with it, once nobody holds the other
    end of standard input: a module that loops reads nothing there, and a container has no parent to die with. As a
    container's first process it takes all others along."""
    parent = os.getpid()
    signal.signal(signal.SIGCHLD, lambda *_: _end_as(os.wait()[1]))
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _die_with(parent)
        return
    closed = select.poll()
    closed.register(0, 0)  # no event but that the other end is closed, which is always told
    closed.poll()
    os._exit(0)


def _end_as(status):
    """End as a child did; a signal is told as a shell tells it."""
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _confine(program):
    """Apply the filter to this process for good (prctl: PR_SET_NO_NEW_PRIVS = 38, PR_SET_SECCOMP = 22, mode 2)."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(program, len(program))
    argument = Program(len(program) // 8, ctypes.cast(code, ctypes.c_void_p))
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(argument), 0, 0):
        raise OSError(ctypes.get_errno(), "the system-call filter could not be applied")


def _describe(error):
    """Class, message and the last line of the module that was running."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<module>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{type(error).__name__}: {str(error)[:500]}" + (f" (line {line} of the module)" if line else "")


def main():
    parent = os.getppid()
    first = _receive()
    if first["watched"]:
        _watch()
    elif first["dies_with_parent"]:
        _die_with(parent)
    for name in first["imports"]:
        importlib.import_module(name)
    sys.stdout = sys.stderr = _Nowhere()
    sys.setrecursionlimit(first["recursion"])
    _limit(first["memory_bytes"])
    _confine(base64.b64decode(first["filter"]))
    limit = first["answer_bytes"]
    # Whoever started a container cannot see what its processes use: there the kernel ends a call that takes too much of
    # the processor. (A namespace's first process, as under bubblewrap, would not get the signal.)
    most = first["call_seconds"] if first["watched"] else 0.0
    _send({"id": 0, "value": "ready"}, limit)
    request, began = _receive(), _begin(most)
    module = types.ModuleType("module")
    sys.modules["module"] = module  # where dataclasses look up annotations that are texts
    try:
        exec(compile(request["source"], "<module>", "exec"), module.__dict__)
    except BaseException as error:
        _send({"id": 0, "error": _describe(error), "used": time.process_time() - began}, limit)
        os._exit(1)
    names = sorted(name for name in vars(module) if not name.startswith("_"))
    _send({"id": 0, "value": names, "used": time.process_time() - began}, limit)
    while True:
        request, began = _receive(), _begin(most)
        try:
            value = _call(module, request["function"], request["arguments"])
            _send({"id": request["id"], "value": value, "used": time.process_time() - began}, limit)
        except BaseException as error:
            _send({"id": request["id"], "error": _describe(error), "used": time.process_time() - began}, limit)


def _begin(most):
    """Allow `most` seconds of processor time from now on (0: any number); the processor time up to now."""
    signal.setitimer(signal.ITIMER_PROF, most)
    return time.process_time()


def _call(module, function, arguments):
    """`name` calls module.name; `name.key` calls module.name[key] (the wrong policies); `=name` reads a constant."""
    if function.startswith("="):
        value = getattr(module, function[1:])
        return sorted(value) if isinstance(value, dict) and all(callable(v) for v in value.values()) else value
    name, _, key = function.partition(".")
    target = getattr(module, name)
    return (target[key] if key else target)(*arguments)


if __name__ == "__main__":
    main()
