"""Compiling a guide in a process of its own, which may take any time and any memory, or die of it.

`python -m redraft.grammar.trial FD VOCAB_SIZE` is a process that has read the tokenizer and forks for each guide: a new
one would take as long to start as many guides to compile. Messages are bytes, over socket pairs.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING

from redraft.request import Guide
from redraft.text import TextCodec

if TYPE_CHECKING:
    from llguidance import LLTokenizer

COMPILE_S = 1.0
"""Most seconds of a processor that a guide may take."""
QUICK_S = 0.1
"""As many are enough for most guides."""
PATIENCE_S = 10.0
"""Most seconds that a guide may take on a machine that has other work, beside those of the processor."""
START_S = 60.0
MOST_BYTES = 2**30
"""Memory that the process may have for its data."""
STACK_BYTES = 2**20
"""Its stack: less than any thread of the parent has."""
READY, GRAMMAR, ERROR, DIED = b"ready", b"grammar:", b"error:", b"died:"
TOO_LARGE = "it is too large, or nested too deeply: expected a simpler one"


class TakesLonger(ValueError):
    """A guide that was not compiled in the time that it was given."""


class Trial:
    """The process as its parent sees it. Threads may share an object. A process that hangs or has gone is replaced."""

    def __init__(self, codec: TextCodec, vocab_size: int):
        self._tokenizer, self._vocab_size = codec.json().encode(), vocab_size
        self._lock = threading.Lock()
        self._ready = False
        self._start()

    def run(self, guide: Guide, seconds: float | None = None) -> str:
        """The guide in the library's terms, after it has been compiled there. Raises ValueError with what is wrong with
        it, and TakesLonger where it takes more than `seconds` of a processor, by default `COMPILE_S`."""
        seconds = COMPILE_S if seconds is None else seconds
        with self._lock:
            process, connection = self._fork()
        try:
            connection.send_bytes(json.dumps([seconds, PATIENCE_S, guide.model_dump()]).encode())
            reply = connection.recv_bytes() if connection.poll(seconds + PATIENCE_S) else None
        except (EOFError, OSError):
            reply = None
        finally:
            connection.close()
        if reply is None:
            self._replace(process)
            raise TakesLonger(f"it takes more than {seconds:g} s to compile: expected a simpler one")
        if reply.startswith(DIED):
            if int(reply.removeprefix(DIED)) in (signal.SIGPROF, signal.SIGALRM):
                raise TakesLonger(f"it takes more than {seconds:g} s to compile: expected a simpler one")
            raise ValueError(TOO_LARGE)
        if reply.startswith(ERROR):
            raise ValueError(reply.removeprefix(ERROR).decode())
        return reply.removeprefix(GRAMMAR).decode()

    def _fork(self) -> tuple[subprocess.Popen[bytes], Connection]:
        """The process, and a connection to a new child of it. A process that was ended is replaced, once."""
        for last in (False, True):
            connection, theirs = Pipe()
            try:
                self._await_ready()
                send_handle(self._connection, theirs.fileno(), self._process.pid)
                return self._process, connection
            except (EOFError, OSError) as error:
                connection.close()
                self._restart()
                if last:
                    raise RuntimeError("the process that compiles guides ends as soon as it starts") from error
            finally:
                theirs.close()
        raise AssertionError

    def _await_ready(self) -> None:
        if self._ready:
            return
        if not self._connection.poll(START_S) or self._connection.recv_bytes() != READY:
            self._restart()
            raise RuntimeError(f"the process that compiles guides did not start within {START_S:g} s")
        self._ready = True

    def _replace(self, process: subprocess.Popen[bytes]) -> None:
        """Start anew, unless another thread has done it."""
        with self._lock:
            if process is self._process:
                self._restart()

    def _restart(self) -> None:
        self._end()
        self._start()

    def _start(self) -> None:
        """Start a process, which need not be ready at once."""
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(self._vocab_size)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TOKENIZERS_PARALLELISM": "false",  # a process that forks has one thread
            "OPENBLAS_NUM_THREADS": "1",
        }
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
    """Fork for guides until the parent is gone."""
    from redraft.grammar.library import grammar_tokens

    connection, vocab_size = Connection(int(sys.argv[1])), int(sys.argv[2])
    tokens = grammar_tokens(TextCodec.of_json(connection.recv_bytes().decode()), vocab_size)
    for limit, most in ((resource.RLIMIT_DATA, MOST_BYTES), (resource.RLIMIT_STACK, STACK_BYTES)):
        resource.setrlimit(limit, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    connection.send_bytes(READY)
    while True:
        try:
            handle = recv_handle(connection)
        except EOFError:
            return
        if os.fork() == 0:
            connection.close()
            _watch(Connection(handle), tokens)
            os._exit(0)
        os.close(handle)


def _watch(connection: Connection, tokens: LLTokenizer) -> None:
    """Compile a guide in a child, and say how it died if it did."""
    seconds, patience_s, guide = json.loads(connection.recv_bytes())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        if seconds > QUICK_S:
            os.nice(10)  # what is slow leaves the processors to the engine
        signal.setitimer(signal.ITIMER_PROF, seconds)  # neither signal has a handler: the library does not return
        signal.setitimer(signal.ITIMER_REAL, seconds + patience_s)
        connection.send_bytes(_reply(Guide.model_validate(guide), tokens))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        connection.send_bytes(DIED + str(os.WTERMSIG(status)).encode())


def _reply(guide: Guide, tokens: LLTokenizer) -> bytes:
    from redraft.grammar.library import compiled, library_grammar

    try:
        grammar = library_grammar(guide)
        compiled(tokens, grammar)
        return GRAMMAR + grammar.encode()
    except RecursionError:
        return ERROR + b"it is nested too deeply"
    except MemoryError:
        return ERROR + TOO_LARGE.encode()
    except Exception as error:
        return ERROR + str(error).encode()


if __name__ == "__main__":
    main()
