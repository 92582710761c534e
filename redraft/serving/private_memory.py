"""A process whose shared memory stays private.

Triton's Python backend opens its shared memory to all users with `fchmod`, whatever the umask says, right after it has
made it. `python private_memory.py PROGRAM ...` becomes PROGRAM, for which, and for all that it starts, `fchmod` does
nothing and succeeds: with a umask of 077 its regions are 0600 from the first moment. Linux on x86-64 and aarch64 only.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys

_NUMBERS = {"x86_64": (0xC000003E, 91, 317), "aarch64": (0xC00000B7, 52, 277)}
"""AUDIT_ARCH of <linux/audit.h>, and the system calls fchmod and seccomp."""
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_SPEC_ALLOW = 1, 4
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
"""Classic BPF: load a word, BPF_JMP | BPF_JEQ | BPF_K, BPF_RET | BPF_K."""
_CALL_OFFSET, _ARCH_OFFSET = 0, 4
_SKIP, _ALLOW = 0x00050000, 0x7FFF0000
"""SECCOMP_RET_ERRNO with the error number 0, and SECCOMP_RET_ALLOW."""


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def private(command: list[str]) -> list[str]:
    """The command line that runs `command` with private shared memory."""
    return [sys.executable, "-I", "-S", __file__, *command]


def ignore_fchmod() -> None:
    """Have the kernel skip this process's calls of fchmod. Raises OSError where it cannot filter them."""
    arch, fchmod, seccomp = _NUMBERS[platform.machine()]
    instructions = (
        _Instruction(_LOAD, 0, 0, _ARCH_OFFSET),
        _Instruction(_JUMP_IF_EQUAL, 0, 3, arch),
        _Instruction(_LOAD, 0, 0, _CALL_OFFSET),
        _Instruction(_JUMP_IF_EQUAL, 0, 1, fchmod),
        _Instruction(_RETURN, 0, 0, _SKIP),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    )
    program = _Program(len(instructions), (_Instruction * len(instructions))(*instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _SECCOMP_FILTER_FLAG_SPEC_ALLOW
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(
        seccomp, _SECCOMP_SET_MODE_FILTER, flags, ctypes.byref(program)
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    try:
        ignore_fchmod()
    except (OSError, KeyError) as error:
        sys.exit(f"other users could read prompts in Triton's shared memory, since seccomp is not available: {error!r}")
    os.execvp(sys.argv[1], sys.argv[1:])
