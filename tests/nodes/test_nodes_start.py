"""Nodes that cannot connect when a heap is made: every rank raises an error that names who and where, within a bound;
nothing is left behind, and the next try works."""

import contextlib
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cluster import run_on
from limits import HANG_S, PROMPT_S
from node_calls import Ready, connections, refuses
from shared_memory import left_in_shared_memory

from symmoe import SymmetricHeap
from symmoe.errors import BackendUnavailable
from symmoe.nodes import reach
from symmoe.nodes.control_channel import COUNTED, GOES_ON, WAITS, ControlChannel, Header
from symmoe.nodes.nccl import NcclError, connect_together
from symmoe.nodes.rail import GlooRail, RailBroken
from symmoe.nodes.reach import Endpoint, Link
from symmoe.symm_mem import several_nodes

START_S = 20.0  # start_timeout_s where gloo waits for half of it


def open_nodes(start_timeout_s: float = HANG_S / 2) -> SymmetricHeap:
    return SymmetricHeap(
        num_bytes=1 << 20, backend="host", ranks_per_node=2, start_timeout_s=start_timeout_s
    )


def open_resources() -> Counter[str]:
    """This process's connections, threads and mapped memory of heaps."""
    return Counter(
        connections=connections(),
        threads=len([*Path("/proc/self/task").iterdir()]),
        arenas=Path("/proc/self/maps").read_text().count("memfd:symmoe"),
    )


# The sockaddr_in in gloo's message: the family, the port, and lo's address.
ADDRESS = re.compile(
    re.escape(socket.AF_INET.to_bytes(2, "little")) + rb"(..)" + b"\x7f\x00\x00\x01", re.DOTALL
)


# The lowest port for gloo, which compares ports in network order, so that the other rank connects. No process listens
# at this port.
LOWEST_PORT = (256).to_bytes(2, "big")


class Publishing(dist.Store):  # type: ignore[misc, name-defined]
    """A store that changes written values."""

    def __init__(self, store, change: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self._store, self._change = store, change

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, self._change(value))

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        return value

    def wait(self, keys: list[str], *timeout) -> None:
        self._store.wait(keys, *timeout)


def publishing(change: Callable[[bytes], bytes]) -> Callable[..., GlooRail]:
    """GlooRail with a published address that `change` has replaced."""
    stores = []  # torch does not keep them

    def make(store, **options) -> GlooRail:
        stores.append(Publishing(store, change))
        return GlooRail(stores[-1], **options)

    return make


# -- what goes wrong on one rank --------------------------------------------------------------------------------------
@contextlib.contextmanager
def answers_not() -> Iterator[None]:
    """The kernel drops connections, as some firewalls do: the queue of this listener is full."""

    def listen(self: reach.Listener) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=0)
        port = self._socket.getsockname()[1]
        stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        self.endpoint = Endpoint("lo", "127.0.0.1", port)

    with contextlib.ExitStack() as stack, patch.object(reach.Listener, "__init__", listen):
        yield


@contextlib.contextmanager
def has_no_such_device() -> Iterator[None]:
    with patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "eth-none"}):
        yield


@contextlib.contextmanager
def refuses_gloo() -> Iterator[None]:
    """The check of connections succeeds; then no process listens at the address that this rank's gloo publishes."""

    def publish(value: bytes) -> bytes:
        (match,) = ADDRESS.finditer(value)
        return value[: match.start(1)] + LOWEST_PORT + value[match.end(1) :]

    with patch.object(several_nodes, "GlooRail", publishing(publish)):
        yield


CONTEXTS = {
    function.__name__: function
    for function in (refuses, answers_not, has_no_such_device, refuses_gloo)
}


def fail_to_start(rank: int, num_ranks: int, name: str, culprit: int) -> dict[str, Any]:
    """The error of a rank, its time, and remaining resources; then a heap works."""
    with open_nodes() as first:  # resources that torch keeps afterwards do not count
        Ready(first, rank).step()
    before = open_resources()
    trouble = CONTEXTS[name] if rank == culprit else contextlib.nullcontext
    start_timeout_s = START_S if name == "refuses_gloo" else HANG_S / 2
    start, error = time.monotonic(), ""
    with (
        trouble(),
        patch.object(several_nodes, "REACH_S", 1.0 if name == "answers_not" else PROMPT_S),
    ):
        try:
            open_nodes(start_timeout_s)
        except BackendUnavailable as raised:
            error = str(raised)
    seconds = time.monotonic() - start
    deadline = time.monotonic() + PROMPT_S
    while (remaining := open_resources() - before) and time.monotonic() < deadline:
        time.sleep(0.01)  # gloo's threads end soon
    dist.barrier()
    with open_nodes() as second:
        Ready(second, rank).step()
    return {"error": error, "seconds": seconds, "left": remaining}


TROUBLES = {
    "refuses": (
        2,
        r"on rank 0: rank 0 on node 0 cannot connect to rank 2 on node 1 at 127.0.0.1:\d+ \(lo\): Connection",
    ),
    "answers_not": (
        1,
        r"on rank 3: rank 3 on node 1 cannot connect to rank 1 on node 0 at 127.* no answer within 1 s",
    ),
    "has_no_such_device": (
        3,
        r"on rank 3: GLOO_SOCKET_IFNAME=eth-none: this machine \(.*\) has no such .*: .*\blo\b",
    ),
    "refuses_gloo": (
        0,
        r"on rank [02]: rank [02] on node [01] does not connect to its rail, ranks \(0, 2\): Gloo",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "refuses_gloo" else ())
        for name in TROUBLES
    ],
)
def test_every_rank_names_the_ranks_that_cannot_connect(cluster, name: str, shared_memory_before):
    culprit, text = TROUBLES[name]
    actual = cluster(4).run(fail_to_start, name, culprit)
    for result in actual:
        assert result["error"] == actual[0]["error"]
        assert result["seconds"] < PROMPT_S
        assert not result["left"], actual
    assert re.match(text, actual[0]["error"]), actual[0]["error"]
    assert "GLOO_SOCKET_IFNAME" in actual[0]["error"]
    assert left_in_shared_memory(shared_memory_before) == set()


@run_on(2)
def test_messages_have_other_bounds_than_connections(rank: int, num_ranks: int) -> None:
    """A message may arrive later than the bound of a connection."""
    dist.barrier()
    store = dist.PrefixStore("late", dist.distributed_c10d._get_default_store())
    rail = GlooRail(store, node=rank, num_nodes=2, timeout_s=10.0)
    sent = torch.full((4,), rank + 1)
    received = torch.zeros(4, dtype=torch.int64)
    time.sleep(3.0 * rank)  # gloo's own bound is 2 s
    rail.wait(rail.begin([(1 - rank, sent)], [(1 - rank, received)]), HANG_S)
    rail.close()
    assert int(received.sum()) == (8, 4)[rank]


# -- connections of hosts -------------------------------------------------------------------------------------------
def test_connections_of_strangers_are_closed():
    with reach.Listener() as listener:
        for message in (
            reach.hello(b"other", 1),
            reach.hello(b"token", 2),
            b"",
            reach.hello(b"token", 1),
        ):
            with reach.connect({1: listener.endpoint}, PROMPT_S)[0][
                1
            ] as sends:  # the message arrives nevertheless
                sends.sendall(message)
        accepted = listener.accept([1], b"token", PROMPT_S)
        assert [*accepted] == [1]
        accepted[1].close()


def test_messages_sent_before_a_close_arrive():
    (to_channel, from_other), (to_other, from_channel) = socket.socketpair(), socket.socketpair()
    channel = ControlChannel({1: Link(to_other, from_other)})
    closing = ControlChannel({0: Link(to_channel, from_channel)})
    for sender in (channel, closing):
        sender.announce(Header(GOES_ON, call=7))
    assert [header.call for header in channel.receive(PROMPT_S)] == [7, 7]
    closing.announce_once(Header(WAITS))
    closing.announce_once(Header(COUNTED, 5))
    assert (channel.look(), channel.counted) == ((set(), None), {1: 5})
    for sender in (channel, closing):
        sender.announce(Header(GOES_ON, call=8))
    closing.abort(1, b"why")
    closing.close()
    assert ((actual := channel.look())[0], actual[1].origin) == (
        {1},
        1,
    )  # the look leaves all messages for receive
    assert channel.receive(PROMPT_S)[1].number == 2  # after the word that it waits
    channel.announce(Header(GOES_ON, call=9))
    with pytest.raises(RailBroken) as broken:
        channel.receive(PROMPT_S)
    assert (
        (header_of_abort := broken.value.abort_header).origin,
        header_of_abort.message.rstrip(b"\0"),
        channel.last_message(1),
    ) == (
        1,
        b"why",
        header_of_abort,
    )
    channel.close()
    assert channel.look() == (set(), None)


def test_devices_have_addresses():
    assert reach._address_of("lo") == "127.0.0.1"
    if Path("/proc/net/if_inet6").exists() and " lo\n" in Path("/proc/net/if_inet6").read_text():
        assert reach._ipv6_address_of("lo") == "::1"
    assert reach._ipv6_address_of("none") == ""


# -- NCCL, of which there is none -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("works", ""),
        (
            "fails",
            "NCCL does not connect node 1 with the others: ncclCommInitRank: connection refused; NCCL_SOCKET",
        ),
        (
            "has no id",
            "NCCL does not connect node 0 with the others: ncclGetUniqueId: no socket interface found; NCCL",
        ),
        (
            "hangs",
            "NCCL has not connected the nodes within 1 s; NCCL_SOCKET_IFNAME and NCCL_IB_HCA name",
        ),
    ],
)
@run_on(2)
def test_nccl_that_does_not_connect_is_named(
    rank: int, num_ranks: int, kind: str, text: str
) -> None:
    actual: dict[str, Any] = {"error": "", "connected": 0}

    def make_id() -> bytes:
        if kind == "has no id":
            raise NcclError("ncclGetUniqueId: no socket interface found")
        return b"id"

    def connect(unique_id: bytes, is_given_up: threading.Event) -> None:
        if kind == "fails" and rank == 1:
            raise NcclError("ncclCommInitRank: connection refused")
        if kind in (
            "fails",
            "hangs",
        ):  # as NCCL waits for a rank that has failed, but that it learns of the end
            is_given_up.wait(HANG_S)
        actual["connected"] += unique_id == b"id" and not is_given_up.is_set()

    store = dist.PrefixStore(f"nccl/{kind}", dist.distributed_c10d._get_default_store())
    start = time.monotonic()
    try:
        connect_together(
            make_id if rank == 0 else None,
            connect,
            store,
            node=rank,
            timeout_s=1.0 if kind == "hangs" else HANG_S,
        )
    except BackendUnavailable as error:
        actual["error"] = str(error)
    seconds = time.monotonic() - start
    for thread in threading.enumerate():
        if thread.name == "symmoe-nccl":
            thread.join(PROMPT_S)
            assert not thread.is_alive()
    assert actual["error"].startswith(text), actual
    assert (actual["error"] == "") == (text == ""), actual
    assert actual["connected"] == (text == ""), actual
    assert seconds < PROMPT_S
