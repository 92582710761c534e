"""Compiling a guide in a process of its own, which may hang or end by it.

`python -m redraft.grammar.trial FD VOCAB_SIZE` is that process. Messages are bytes, over a socket pair.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from redraft.request import Guide
from redraft.text import TextCodec

COMPILE_S = 1.0
"""Longest that a guide may take."""
START_S = 60.0
MOST_BYTES = 2**30
"""Memory that the process may have for its data."""
STACK_BYTES = 2**20
"""Its stack: less than any thread of the parent has."""
READY, GRAMMAR, ERROR = b"ready", b"grammar:", b"error:"


class Trial:
    """The process as its parent sees it. A guide that takes too long, too much memory, or the process with it is
    refused, and the next one has a new process."""

    def __init__(self, codec: TextCodec, vocab_size: int):
        self._tokenizer, self._vocab_size = codec.json().encode(), vocab_size
        self._ready = False
        self._start()

    def run(self, guide: Guide) -> str:
        """The guide in the library's terms, after it has been compiled there. Raises ValueError with what is wrong with
        it."""
        if self._process.poll() is not None:
            self._restart()
        try:
            if not self._ready:
                if not self._connection.poll(START_S) or self._connection.recv_bytes() != READY:
                    self._restart()
                    raise RuntimeError(f"the process that compiles guides did not start within {START_S:g} s")
                self._ready = True
            self._connection.send_bytes(guide.model_dump_json().encode())
            if not self._connection.poll(COMPILE_S):
                self._restart()
                raise ValueError(f"it takes more than {COMPILE_S:g} s to compile: expected a simpler one")
            reply = self._connection.recv_bytes()
        except (EOFError, OSError):
            self._restart()
            raise ValueError("it is too large, or nested too deeply: expected a simpler one") from None
        if reply.startswith(ERROR):
            raise ValueError(reply.removeprefix(ERROR).decode())
        return reply.removeprefix(GRAMMAR).decode()

    def _restart(self) -> None:
        self._end()
        self._start()

    def _start(self) -> None:
        """Start a process, which need not be ready at once."""
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(self._vocab_size)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is the parent's
        )
        theirs.close()
        self._end = weakref.finalize(self, _end, self._process, self._connection)
        self._ready = False
        self._connection.send_bytes(self._tokenizer)


def _end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


def main() -> None:
    """Answer guides until the parent is gone."""
    from redraft.grammar.library import compiled, grammar_tokens, library_grammar

    connection, vocab_size = Connection(int(sys.argv[1])), int(sys.argv[2])
    tokens = grammar_tokens(TextCodec.of_json(connection.recv_bytes().decode()), vocab_size)
    for limit, most in ((resource.RLIMIT_DATA, MOST_BYTES), (resource.RLIMIT_STACK, STACK_BYTES)):
        resource.setrlimit(limit, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.send_bytes(READY)
    while True:
        try:
            guide = Guide.model_validate_json(connection.recv_bytes())
        except EOFError:
            return
        signal.alarm(10 + int(COMPILE_S))  # the parent may be gone, and the library does not return
        try:
            grammar = library_grammar(guide)
            compiled(tokens, grammar)
            reply = GRAMMAR + grammar.encode()
        except RecursionError:
            reply = ERROR + b"it is nested too deeply"
        except ValueError as error:
            reply = ERROR + str(error).encode()
        signal.alarm(0)
        connection.send_bytes(reply)


if __name__ == "__main__":
    main()
