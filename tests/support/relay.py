"""TCP relays between nodes, which can delay what they pass on, hold it back for ever, or cut the connection. Hosts tell
each other where they listen, and gloo's ranks write that into a store. A rank of node 0 says its relay's address
instead, and takes the relay for the rank of node 1 on its rail: all connections of that pair go through it."""

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
import torch.distributed as dist

import symmoe.symm_mem.several_nodes
from symmoe.nodes import reach
from symmoe.nodes.rail import GlooRail

# What gloo writes has a sockaddr_in in it: the family, the port, and lo's address.
_ADDRESS = re.compile(
    re.escape(socket.AF_INET.to_bytes(2, "little")) + rb"(..)" + b"\x7f\x00\x00\x01", re.DOTALL
)


class Relay:
    """Passes the connections of one rail on to a rank of this process."""

    def __init__(self) -> None:
        self.delay_s, self.num_bytes = 0.0, 0  # how long each piece is held back; passed on so far
        self._flows = threading.Event()
        self._flows.set()
        self._is_closed = False
        self._listeners: list[socket.socket] = []
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def open(self, port: int, listener: socket.socket) -> int:
        """Begins to pass a connection of this listener on to the one at that port; the port of this one."""
        self._listeners.append(listener)
        self._start(self._accept, listener, port)
        return int(listener.getsockname()[1])

    def stall(self) -> None:
        """Passes nothing on any more, not even that a side has closed."""
        self._flows.clear()

    def cut(self) -> None:
        """Closes all connections on both sides."""
        _shut(*self._ends)

    def close(self) -> None:
        """Ends everything, threads included."""
        self._is_closed = True
        self._flows.set()
        _shut(*self._listeners)  # which wakes the threads that accept
        self.cut()
        for thread in self._threads:
            thread.join()
        for each in (*self._listeners, *self._ends):
            each.close()

    def _start(self, function: Callable[..., None], *arguments) -> None:
        self._threads.append(threading.Thread(target=function, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self, listener: socket.socket, port: int) -> None:
        try:
            far, _ = listener.accept()
        except OSError:
            return  # closed before anybody came
        near = socket.create_connection(("127.0.0.1", port))
        for end in (far, near):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ends += [far, near]
        self._start(self._pass_on, far, near)
        self._start(self._pass_on, near, far)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(self.delay_s)
                self._flows.wait()
                if self._is_closed:
                    break
                target.sendall(data)
                self.num_bytes += len(data)
        self._flows.wait()
        _shut(source, target)


def _shut(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):  # its peer may have gone
            end.shutdown(socket.SHUT_RDWR)


class _Publishing(dist.Store):  # type: ignore[misc, name-defined]
    """A store that changes what is written into it."""

    def __init__(self, store, change: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self._store, self._change = store, change

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, self._change(value))

    def get(self, key: str) -> bytes:
        found: bytes = self._store.get(key)
        return found

    def wait(self, keys: list[str], *timeout) -> None:
        self._store.wait(keys, *timeout)


def publishing(change: Callable[[bytes], bytes]) -> Callable[..., GlooRail]:
    """GlooRail, of which others read where it listens as it is after the change."""
    stores = []  # torch does not keep them

    def make(store, name: str, **options) -> GlooRail:
        stores.append(_Publishing(store, change))
        return GlooRail(stores[-1], name, **options)

    return make


@contextlib.contextmanager
def relayed(node: int) -> Iterator[Relay | None]:
    """Between nodes 0 and 1 the heaps that are made inside go through relays, one a rail; None on node 1."""
    relay = Relay() if node == 0 else None

    def publish(value: bytes) -> bytes:
        (found,) = _ADDRESS.finditer(value)
        # Of a pair the one with the higher address connects, as each sees its own and what the other has written: the
        # rank on node 0 must find itself lower, and its relay must be lower than the rank on node 1.
        if relay is None:
            return value[: found.end() - 1] + b"\x02" + value[found.end() :]
        port = relay.open(int.from_bytes(found[1], "big"), _listen_low())
        return value[: found.start(1)] + port.to_bytes(2, "big") + value[found.end(1) :]

    class Listener(reach.Listener):
        def __init__(self) -> None:
            super().__init__()
            self.endpoint = behind(self.endpoint)

    def behind(endpoint: reach.Endpoint) -> reach.Endpoint:
        if relay is None:
            return endpoint
        return replace(
            endpoint, port=relay.open(endpoint.port, socket.create_server(("127.0.0.1", 0)))
        )

    def connect(others: Mapping[int, reach.Endpoint], timeout_s: float):
        return reach.connect(
            {rank: behind(endpoint) for rank, endpoint in others.items()}, timeout_s
        )

    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, each in {
                "GlooRail": publishing(publish),
                "Listener": Listener,
                "connect": connect,
            }.items():
                patch.setattr(symmoe.symm_mem.several_nodes, name, each)
            yield relay
    finally:
        if relay is not None:
            relay.close()


def _listen_low() -> socket.socket:
    """A listener on a port that gloo takes for lower than those that the system gives out: to gloo, which compares
    ports as they lie in memory, a multiple of 256 is only its high byte."""
    listener, first = socket.socket(), os.getpid()
    for number in range(80):
        with contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", 256 * (40 + (first + number) % 80)))
            listener.listen(1)
            return listener
    raise OSError("no port is free")
