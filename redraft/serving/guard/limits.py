"""What a request may be, in one place for both protocols."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

MAX_BODY_BYTES = 4 * 2**20
"""A body or message. A prompt of 128k tokens takes 0.5 MB as text and 1 MB as token ids."""
MAX_BODIES_BYTES = 16 * MAX_BODY_BYTES
"""All bodies and messages together: of HTTP from their first byte, of gRPC once they are whole, until the request ends
or, in a stream, Triton has taken them. What is arriving over gRPC is the library's, and MAX_CALLS bounds it."""
MAX_ELEMENTS = MAX_BODY_BYTES
"""Elements of a tensor, each of which takes a byte at least. Larger shapes overflow where sizes are computed."""
MAX_TENSORS = 64
"""Inputs of a request, and outputs; no model has so many. 4 MiB hold two million empty ones: seconds of checks."""
MAX_FIELDS = 128
"""Keys of a JSON object, and parameters of a request: Triton compares each with all others. No model has half as many
fields."""
MAX_ITEMS = 4096
"""Texts of one field; the models take 1024 at most. Their only thread unpacks each one before they can refuse any.
Numbers are taken as they lie in memory, and may be many."""
MAX_NAME = 256
"""Characters of an id, a name or a data type. Triton repeats ids in each response, and names in errors."""
MAX_CHUNKS = 4096
"""Chunks of an HTTP body: 1 KB each in the largest. Triton before 25.07 keeps each one on its stack."""
MAX_HEADER_BYTES, MAX_HEADERS = 8192, 64
"""An HTTP header line and their number; all metadata of a gRPC call. Clients send a tenth of it."""
MAX_REQUESTS = 1024
"""Inference requests over HTTP in flight. By default the worker runs and queues far fewer."""
MAX_CALLS = 256
"""Calls over gRPC whose messages are read, streams included. Each may hold MAX_BODY_BYTES of a message that is
arriving. Health, whose messages are not read, is not counted. A stream takes any number of requests."""
MAX_STREAMS = 2 * MAX_CALLS
"""Calls of any kind over one gRPC connection. The library keeps a call whose client does not take the answer, and
cannot be told to drop it."""
BODY_S = 30.0
"""A body, the message of a unary call, or a stream's first, takes longer only where its sender holds it back, or at
about 1 Mbit/s."""
UNREAD_S = 30.0
"""A stream of events whose client reads nothing for so long is cut. It has a few MB unread then."""
IDLE_S = 60.0
"""A connection without a complete request header is closed after so long."""
LINGER_S = 2.0
"""How long the rest of a refused body is read and dropped, so that its client sees the answer."""
METADATA_S = 5.0
"""Triton answers anything but inference in milliseconds, or hangs."""
END_S = 1.0
"""What is in flight when the guard is asked to end may take so long: Triton has ended before it."""


class Room:
    """The bytes that the bodies of all requests take together, at most `limit`. `refuse` makes the error for more."""

    def __init__(self, limit: int, refuse: Callable[[str], Exception]):
        self._limit, self._refuse = limit, refuse
        self._taken = 0

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Count one body while it is held. Yields a function that counts more bytes of it, or raises."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self._taken + size > self._limit:
                raise self._refuse(f"overloaded: bodies of {self._limit} bytes are held: try again later")
            self._taken += size
            taken += size

        try:
            yield take
        finally:
            self._taken -= taken
