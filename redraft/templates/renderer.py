"""Renders chat templates in a process that is started with the first one and kept."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redraft.request import MAX_MESSAGE_BYTES

CPU_S = 5.0
"""CPU time that a template has for a conversation. Usual ones take a millisecond."""
MEMORY_BYTES = 2**30
"""Address space of the process."""
CHILD = Path(__file__).with_name("child.py")


class TemplateError(ValueError):
    """A chat template cannot be read, refuses a conversation, or takes too much."""


class CannotWrite(TemplateError):
    """The program failed on what it was given."""


class Renderer:
    """The process. Threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, source: str) -> None:
        """Raises TemplateError for a template that cannot be read."""
        self._ask({"source": source})

    def render(self, source: str, values: Mapping[str, Any]) -> str:
        """A template's text. Raises TemplateError, and ValueError for values that JSON does not have."""
        return self._ask({"source": source, "values": values})

    def close(self) -> None:
        """End the process; a later call starts another."""
        with self._lock:
            self._drop()

    def _ask(self, request: Mapping[str, Any]) -> str:
        try:
            line = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"expected values that JSON has: {error}") from None
        with self._lock:
            answer = self._exchange(line)
        if not answer:
            raise TemplateError(
                f"the chat template takes more than {CPU_S:g} s or {MEMORY_BYTES >> 30} GiB for this conversation"
            )
        return _text(json.loads(answer.decode("utf-8", "surrogatepass")))

    def _exchange(self, line: bytes) -> bytes:
        """A request's answer; empty if the process died of it."""
        for again in (True, False):
            process = self._process or self._start()
            assert process.stdin
            assert process.stdout
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:  # it had died before, say of a lack of memory elsewhere
                self._drop()
                if again:
                    continue
                raise
            except BaseException:  # an interrupt: the answer that is still to come belongs to nobody
                self._drop(kill=True)
                raise
            if not answer.endswith(b"\n"):
                self._drop()
                return b""
            return answer
        raise AssertionError

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", str(CHILD), *map(str, (CPU_S, MEMORY_BYTES, MAX_MESSAGE_BYTES))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._process = process
        assert process.stdout
        if not process.stdout.readline():
            self._drop()
            raise RuntimeError(f"{CHILD} did not start")
        return process

    def _drop(self, kill: bool = False) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            process.kill()
        with contextlib.suppress(OSError):
            process.communicate()

    def forget(self) -> None:
        """Leave the process to the parent, of which this one is a fork."""
        self._lock = threading.Lock()
        self._process = None


def _text(answer: Mapping[str, str]) -> str:
    if "unreadable" in answer:
        raise TemplateError(f"the chat template cannot be read: {answer['unreadable']}")
    if "refused" in answer:
        raise TemplateError(answer["refused"])
    if "failed" in answer:
        raise CannotWrite(f"the chat template cannot write these messages: {answer['failed']}")
    return answer["text"]


RENDERER = Renderer()
atexit.register(RENDERER.close)
os.register_at_fork(after_in_child=RENDERER.forget)
