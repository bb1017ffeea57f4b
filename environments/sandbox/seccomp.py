"""System-call filters of the sandbox, assembled as classic BPF programs (seccomp(2), linux/filter.h).

Two filters stand one behind the other. `outer_filter` is applied by bubblewrap before the interpreter starts: it
lets a Python interpreter load itself and denies what no part of it ever needs (sockets, new processes, namespaces,
mounts, tracing, keys, BPF). `inner_filter` is applied by the worker itself once everything it will ever need is in
memory, just before the first line of a generated module runs: from there on nothing can be opened, executed,
forked or signalled, and only reading and writing the pipe, memory, clocks, a timer and exit are left.
"""

from __future__ import annotations

import platform
import struct

from errors import SandboxError

_KILL = 0x80000000
_ALLOW = 0x7FFF0000
_EPERM = 0x00050000 | 1
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _THIRD_ARGUMENT = 0, 4, 32
_PROT_EXEC = 4
_X32_BIT = 0x40000000

# AUDIT_ARCH value and column of the tables below, by machine.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# name: (x86_64, aarch64); None where the architecture has no such call.
_INNER_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "brk": (12, 214),
    "madvise": (28, 233),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "futex": (202, 98),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "getrandom": (318, 278),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "restart_syscall": (219, 128),
    "sched_yield": (24, 124),
    "getrusage": (98, 165),
    "times": (100, 153),
    "setitimer": (38, 103),
}
_INNER_MEMORY: dict[str, tuple[int | None, int | None]] = {"mmap": (9, 222), "mprotect": (10, 226)}
# The interpreter itself makes these in harmless moments (a traceback looks for source text): refused, not killed.
_INNER_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None),
    "openat": (257, 56),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getcwd": (79, 17),
    "ioctl": (16, 29),
    "lseek": (8, 62),
    "fcntl": (72, 25),
    "uname": (63, 160),
    "getdents64": (217, 61),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getppid": (110, 173),
    "sysinfo": (99, 179),
    "prlimit64": (302, 261),
    "sched_getaffinity": (204, 123),
}
_OUTER_DENIED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "clone": (56, 220),
    "clone3": (435, 435),
    "fork": (57, None),
    "vfork": (58, None),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "chroot": (161, 51),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "open_by_handle_at": (304, 265),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "personality": (135, 92),
    "acct": (163, 89),
}


def outer_filter(machine: str | None = None) -> bytes:
    """The filter for `bwrap --seccomp`: everything but `_OUTER_DENIED`, which answers EPERM. Array of `sock_filter`."""
    arch, column = _machine(machine)
    program = _prologue(arch, column)
    for number in _numbers(_OUTER_DENIED, column):
        program += _rule(number, _EPERM)
    return b"".join([*program, _instruction(_RETURN, value=_ALLOW)])


def inner_filter(machine: str | None = None) -> bytes:
    """The filter a worker applies to itself: `_INNER_ALLOWED`, memory without execution, a refusal for the look-ups an
    interpreter makes by itself, and death (SIGSYS) for every other call. Array of `sock_filter`."""
    arch, column = _machine(machine)
    program = _prologue(arch, column)
    for number in _numbers(_INNER_ALLOWED, column):
        program += _rule(number, _ALLOW)
    for number in _numbers(_INNER_MEMORY, column):
        program += [
            _instruction(_EQUAL, 0, 4, number),
            _instruction(_LOAD, value=_THIRD_ARGUMENT),
            _instruction(_ANY_BIT, 0, 1, _PROT_EXEC),
            _instruction(_RETURN, value=_EPERM),
            _instruction(_RETURN, value=_ALLOW),
        ]
    for number in _numbers(_INNER_REFUSED, column):
        program += _rule(number, _EPERM)
    return b"".join([*program, _instruction(_RETURN, value=_KILL)])


def _machine(machine: str | None) -> tuple[int, int]:
    name = machine or platform.machine()
    if name not in _MACHINES:
        raise SandboxError(f"no system-call filter for machine {name!r}; known: {sorted(_MACHINES)}")
    return _MACHINES[name]


def _prologue(arch: int, column: int) -> list[bytes]:
    program = [
        _instruction(_LOAD, value=_ARCH),
        _instruction(_EQUAL, 1, 0, arch),
        _instruction(_RETURN, value=_KILL),
        _instruction(_LOAD, value=_NUMBER),
    ]
    if column == 0:  # x86_64 only: the x32 calls share the architecture value and would pass by other numbers.
        program += [_instruction(_AT_LEAST, 0, 1, _X32_BIT), _instruction(_RETURN, value=_KILL)]
    return program


def _numbers(table: dict[str, tuple[int | None, int | None]], column: int) -> list[int]:
    return [number for row in table.values() if (number := row[column]) is not None]


def _rule(number: int, verdict: int) -> list[bytes]:
    return [_instruction(_EQUAL, 0, 1, number), _instruction(_RETURN, value=verdict)]


def _instruction(code: int, if_true: int = 0, if_false: int = 0, value: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
