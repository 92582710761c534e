"""Malformed HTTP requests, as bytes on a socket, for Triton's protocol and metrics, and for `/v1`."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TEXT, TOKENS = "Once upon a time", 4
_TENSORS = [
    {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [TEXT]},
    {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [TOKENS]},
]
TRITON: dict[str, dict[str, Any]] = {
    "/v2/models/ensemble/generate": {"text_input": TEXT, "max_tokens": TOKENS},
    "/v2/models/ensemble/generate_stream": {"text_input": TEXT, "max_tokens": TOKENS, "stream": True, "seed": 1},
    "/v2/models/tensorrt_llm/generate": {"input_ids": [1, 2, 3], "request_output_len": TOKENS},
    "/v2/models/ensemble/infer": {"inputs": _TENSORS, "outputs": [{"name": "text_output"}]},
}
"""Requests of Triton's protocol that are right, by path."""
_MESSAGES = [{"role": "user", "content": TEXT}]
OPENAI: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": TOKENS, "stream": True, "stop": ["x"], "timeout": 5},
    "/v1/completions": {"prompt": TEXT, "max_tokens": TOKENS, "logit_bias": {"1": 1}, "timeout": 5},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 16, "timeout": 5},
}
"""And of `/v1`. One that loses its length still ends soon, by its timeout."""
METRICS: dict[str, dict[str, Any]] = {"/metrics": {"text_input": TEXT}}
"""And, with a body that nobody asked for, of the port with Triton's metrics."""
_WRONG: tuple[Any, ...] = (None, True, -1, 1.5, "", "x", [], {}, [[]], [None], {"a": []}, 2**31, 2**63, 2**64, [1] * 99)
_HUGE = ("1" + "0" * 400, "-" + "9" * 5000, "1e400", "-1e400", "1e-400", "18446744073709551616", "NaN", "-Infinity")
_DEPTHS = (300, 300, 10_000, 10_000, 1_000_000)
_LARGE, _RARE = 5 * 2**20, 100


@dataclass(frozen=True)
class Raw:
    """Bytes for a socket. A `patient` client waits for the answer; another one ends its side where none comes soon, as
    the server may wait for more."""

    data: bytes
    patient: bool = False


def request(rng: random.Random, valid: dict[str, dict[str, Any]]) -> tuple[str, Raw]:
    """One request and its kind; `valid` are right ones by path."""
    path, body = rng.choice(list(valid.items()))
    make = rng.choice(_KINDS)
    return make.__name__.strip("_"), make(rng, path, body)


def _post(path: str, body: bytes, *headers: str) -> Raw:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", f"Content-Length: {len(body)}"]
    if not any(header.startswith("Content-Type") for header in headers):
        lines.append("Content-Type: application/json")
    return Raw("\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + body, patient=True)


def _with(body: dict[str, Any], name: str, text: str) -> bytes:
    """A body with a field of this JSON text, right or not."""
    rest = json.dumps({key: value for key, value in body.items() if key != name})
    return f"{rest[:-1]}{', ' if len(rest) > 2 else ''}{json.dumps(name)}: {text}}}".encode("utf-8", "surrogatepass")


def _empty(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    return _post(path, rng.choice((b"", b" ", b"\0", b"null", b"[]", b'""', b"{}")))


def _truncated(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    data = json.dumps(body).encode()
    return _post(path, data[: rng.randrange(len(data))])


def _flipped(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    """Some bits of a right body."""
    data = bytearray(json.dumps(body).encode())
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return _post(path, bytes(data))


def _wrong_type(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    return _post(path, json.dumps(body | {rng.choice(list(body)): rng.choice(_WRONG)}).encode())


def _missing(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    gone = rng.choice(list(body))
    return _post(path, json.dumps({key: value for key, value in body.items() if key != gone}).encode())


def _huge_number(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    name = rng.choice([*body, "temperature", "top_p", "top_k", "seed", "n", "id"])
    return _post(path, _with(body, name, rng.choice(_HUGE)))


def _unknown_field(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    name = "".join(rng.choices(string.printable, k=rng.choice((1, 10, 1000))))
    return _post(path, json.dumps(body | {name: rng.choice(_WRONG)}).encode())


def _surrogate(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    lone = rng.choice(("\\ud800", "\\udfff", "\\udc00\\ud800", "\\ud83d"))
    return _post(path, _with(body, rng.choice([*body, "id"]), f'"{lone}"'))


def _not_utf8(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    data = json.dumps(body).encode()
    index = rng.randrange(len(data))
    return _post(path, data[:index] + bytes(rng.choices(range(0x80, 0x100), k=rng.randint(1, 9))) + data[index:])


def _nested(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    depth, (begin, end) = rng.choice(_DEPTHS), rng.choice((("[", "]"), ('{"a":', "}")))
    text = begin * depth + "1" + end * depth * rng.randint(0, 1)
    return _post(path, _with(body, rng.choice([*body, "x"]), text) if rng.random() < 0.5 else text.encode())


def _repeated_key(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    name = rng.choice([*body, "outputs"])
    bad = '[{"name": "text_output", "parameters": {"classification": 1}}]'
    data = json.dumps(body)
    return _post(path, f"{{{json.dumps(name)}: {bad}, {data[1:]}".encode())


def _tensor(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    """Shapes, parameters and binary lengths of Triton's `infer`; elsewhere an unknown field."""
    shape = [rng.choice((-1, 0, 1, 2**31, 2**62, 2**64, "1")) for _ in range(rng.choice((0, 1, 2, 3, 40)))]
    names = ("classification", "shared_memory_region", "shared_memory_byte_size", "binary_data_size", "binary_data")
    parameters = {rng.choice(names): rng.choice((-1, 0, 1, 2**40, "x", None))}
    bad = {"name": "text_input", "shape": shape, "datatype": rng.choice(("BYTES", "INT32", "X", 5)), "data": [TEXT]}
    tensors = {rng.choice(("inputs", "outputs")): [bad | rng.choice(({}, {"parameters": parameters}))]}
    length = f"Inference-Header-Content-Length: {rng.choice((-1, 0, 3, 10**9, 10**30, 'x'))}"
    return _post(path, json.dumps(body | tensors).encode(), *rng.choice(((), (length,))))


def _length(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    """A Content-Length that is not the body's, or none."""
    data = json.dumps(body).encode()
    values = (len(data) - 5, len(data) + 5, -1, 10**9, 10**30, "x", "", f"{len(data)}, 3", f"+{len(data)}")
    line = rng.choice([*(f"Content-Length: {value}\r\n" for value in values), "", "Content-Length: 2\r\n" * 2])
    return Raw(f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{line}\r\n".encode() + data)


def _chunked(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    data = json.dumps(body).encode()
    good = b"%x\r\n%s\r\n" % (len(data), data)
    bodies = (
        b"zz\r\n", b"-1\r\n", b"f" * 40 + b"\r\n", b"5\r\nab\r\n0\r\n\r\n", good, good + b"0\r\n", b"1\r\n{\r\n" * 3000,
        b"1\r\n \r\n" * 20_000 + b"0\r\n\r\n", good + b"0\r\nA: b\r\n" * 200 + b"\r\n",
        b"1;a=" + b"b" * 9000 + b"\r\n{",
    )  # fmt: skip
    length = rng.choice(("", f"Content-Length: {len(data)}\r\n"))
    coding = rng.choice(("chunked", "chunked", "gzip, chunked", "chunked, chunked", "x"))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{length}Transfer-Encoding: {coding}\r\n\r\n"
    return Raw(head.encode() + rng.choice(bodies))


def _slow(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    """Less than the whole, whose client rarely waits until the server gives it up."""
    raw = _post(path, json.dumps(body).encode())
    return Raw(raw.data[: rng.randrange(len(raw.data) - 9, len(raw.data))], patient=rng.randrange(_RARE) == 0)


def _large(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    """Rarely more than a server takes at once; else no JSON."""
    size = _LARGE if rng.randrange(_RARE // 4) == 0 else 100_000
    kind = rng.choice(("application/x-www-form-urlencoded", "application/json", "multipart/form-data"))
    return _post(path, rng.choice((b"a", b"[1,")) * size, f"Content-Type: {kind}")


def _encoded(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    data = rng.choice((rng.randbytes(99), json.dumps(body).encode()))
    return _post(path, data, f"Content-Encoding: {rng.choice(('gzip', 'deflate', 'br', 'x', 'gzip, gzip'))}")


def _headers(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    bad = ("A: " + "a" * 70_000, "A\0: b", ": b", "A b", "A: \0", " folded", "\u00e9: \u00ff")
    lines = rng.choice(([rng.choice(bad)], [f"A{number}: b" for number in range(3000)]))
    return _post(path, json.dumps(body).encode(), *lines)


def _address(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    """Another path or method, or none that is HTTP."""
    model = path.rpartition("/")[0]
    paths = (
        "", "*", "//", "/v2/../v2/repository/index", "/v2/logging", "/v2/systemsharedmemory/region/x/register",
        f"{path}/x", f"{path}?a=%00", f"{model}/versions/9/infer", f"{path}%2e", "/" + "a" * 70_000, "/\x00", "/%ff%fe",
    )  # fmt: skip
    method = rng.choice(("GET", "POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE", "X" * 9000, "get", ""))
    raw = _post("@", json.dumps(body).encode()).data
    version = rng.choice(("HTTP/1.1", "HTTP/1.0", "HTTP/9.9", "HTTP/2", ""))
    return Raw(f"{method} {rng.choice(paths)} {version}".encode() + raw.removeprefix(b"POST @ HTTP/1.1"))


def _garbage(rng: random.Random, path: str, body: dict[str, Any]) -> Raw:
    """Bytes that are no HTTP, of another protocol, or two requests in one."""
    right = _post(path, json.dumps(body).encode()).data.replace(b"Connection: close\r\n", b"")
    others = (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n" * 999,
        b"", b"\0" * 9999,
        right[: rng.randrange(len(right))], right * 3, right + b"\xff" * 99,
    )  # fmt: skip
    return Raw(rng.choice((rng.randbytes(rng.choice((1, 100, 100_000))), *others)))


_KINDS: tuple[Callable[[random.Random, str, dict[str, Any]], Raw], ...] = (
    _empty, _truncated, _flipped, _wrong_type, _missing, _huge_number, _unknown_field, _surrogate, _not_utf8, _nested,
    _repeated_key, _tensor, _length, _chunked, _slow, _large, _encoded, _headers, _address, _garbage,
)  # fmt: skip
