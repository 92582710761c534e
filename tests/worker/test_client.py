"""A worker's client: it comes and goes, and talks to workers of other versions."""

from __future__ import annotations

import threading

import msgpack
import pytest
import zmq

from redraft.request import PROTOCOL_LIMITS, GenerateRequest
from redraft.worker.client import NOT_THERE, WorkerClient, WorkerError
from redraft.worker.protocol import SHUTTING_DOWN, STOPPING


def test_clients_come_and_go(tmp_path):
    for _ in range(300):
        WorkerClient(tmp_path / "none.sock").close()


def test_no_worker_is_there(tmp_path):
    """It restarts, or the service is being stopped."""
    with WorkerClient(tmp_path / "none.sock") as client:
        for stopping, said in ((False, NOT_THERE), (True, SHUTTING_DOWN)):
            if stopping:
                (tmp_path / STOPPING).touch()
            assert client.stopping is stopping
            with pytest.raises(WorkerError) as refused:
                client.complete(GenerateRequest(id="r", text="hello", max_tokens=1))
            assert (refused.value.code, str(refused.value)) == ("service_unavailable", said)


def test_a_worker_of_another_version(tmp_path):
    """It tells other limits: the client's only thread goes on, with the protocol's. It gets a request's fields that are
    not as by default, and so none that it need not know."""
    messages = []
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path / 'socket'}")

    def answer() -> None:
        for _ in range(3):  # the client asks for itself, then for the test
            peer, data = router.recv_multipart()
            messages.append(msgpack.unpackb(data))
            router.send_multipart([peer, msgpack.packb({"op": "status", "limits": {"max_len": 10}})])

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with WorkerClient(tmp_path / "socket") as client:
        assert client.wait_connected(60)
        assert client.status(10).limits == {"max_len": 10}
        assert client.prompt_limits == PROTOCOL_LIMITS
        fields = {"id": "r", "text": "hello", "max_tokens": 20, "stop_words": ["x"], "sampling": {"top_k": 3}}
        client.submit(GenerateRequest(**fields), lambda _: None)
        thread.join(60)
    assert messages[2] == {"op": "generate", **fields}
