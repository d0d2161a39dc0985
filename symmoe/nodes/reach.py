"""Connections between hosts of ranks on several nodes: each to every other, before gloo or NCCL do ("Start" in
docs/design/nodes.md). Each rank listens where gloo will, and its rail peers connect to it. A rank sends on the
connections that it has made, and receives on accepted connections. So the sending side never has unread data, and
messages arrive even if the rank closes right after them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from symmoe.errors import BackendUnavailable

DEVICE_VARIABLE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR: the IPv4 address of a device, in 4 bytes after the first 20 of a struct ifreq
_IFREQ = struct.Struct("16s16x8x")
_IPV6_ADDRESSES = Path(
    "/proc/net/if_inet6"
)  # a line for each: 32 hexadecimal digits first, the device last
_LOOPBACK = "127.0.0.1"
_RANK_BYTES = 4
REACH_S = 10.0  # for connections: three attempts of Linux
_SEND_S = 5.0  # for a peer to read its messages: hosts are never more than a header ahead


class Endpoint(NamedTuple):
    """The address at which a rank listens."""

    device: str  # name of the network device; "": not known
    host: str = ""
    port: int = 0  # 0: the rank does not listen, as the device's address is unknown

    @property
    def is_loopback(self) -> bool:
        """Whether only its own machine can reach it."""
        return bool(self.host) and ip_address(self.host.partition("%")[0]).is_loopback

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" + (f" ({self.device})" if self.device else "")


class Listener(contextlib.AbstractContextManager["Listener"]):
    """Listens at `endpoint`, like gloo: at the device named by GLOO_SOCKET_IFNAME, or at the address of the host's
    name. A context manager; peers must connect before it ends. BackendUnavailable: there is no such device."""

    _socket: socket.socket | None = None

    def __init__(self) -> None:
        device = os.environ.get(DEVICE_VARIABLE, "").split(",")[0]
        self.endpoint = Endpoint(device)  # without an address it does not listen; peers find this
        for address in filter(None, [_address_of(device)] if device else _addresses_of_host()):
            with contextlib.suppress(OSError):
                self._socket = socket.create_server(
                    (address, 0),
                    family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                    backlog=socket.SOMAXCONN,
                )
                self.endpoint = Endpoint(
                    device or _device_with(address), address, self._socket.getsockname()[1]
                )
                break

    def __exit__(self, *exc: object) -> None:
        if self._socket is not None:
            self._socket.close()

    def accept(
        self, ranks: Collection[int], token: bytes, timeout_s: float
    ) -> dict[int, socket.socket]:
        """The connections of these ranks, by rank, after each has sent :func:`hello`; closes all other connections.
        OSError: the ranks need longer."""
        assert self._socket is not None
        deadline = time.monotonic() + timeout_s
        accepted: dict[int, socket.socket] = {}
        with contextlib.ExitStack() as unused:
            while len(accepted) < len(ranks):
                self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
                connection, _ = self._socket.accept()
                connection.settimeout(max(1e-3, deadline - time.monotonic()))
                message = connection.recv(len(token) + _RANK_BYTES, socket.MSG_WAITALL)
                rank = int.from_bytes(message[len(token) :], "little")
                if message == hello(token, rank) and rank in ranks and rank not in accepted:
                    accepted[rank] = unused.enter_context(connection)
                else:
                    connection.close()
            unused.pop_all()
        return accepted


class Link(NamedTuple):
    """Two connections with a rank of another node: this rank has made the connection on which it sends."""

    sends: socket.socket
    receives: socket.socket


def hello(token: bytes, rank: int) -> bytes:
    """The first message of a rank on a connection that it has made. token: of the rails of one heap."""
    return token + rank.to_bytes(_RANK_BYTES, "little")


def connect(
    endpoints: Mapping[int, Endpoint], timeout_s: float, first: bytes = b""
) -> tuple[dict[int, socket.socket], dict[int, str]]:
    """Connections to the endpoints, by rank, and the reasons for failed connections. Local; takes at most timeout_s.
    first: a message for each connection, see :func:`hello`."""

    def attempt(endpoint: Endpoint) -> socket.socket | str:
        if not endpoint.port:
            return "it listens nowhere"
        try:
            connection = socket.create_connection((endpoint.host, endpoint.port), timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(_SEND_S)
            connection.sendall(first)
        except OSError as error:  # Python's own timeout error has no text of the system
            return error.strerror or f"no answer within {timeout_s:g} s"
        return connection

    with ThreadPoolExecutor(max(1, len(endpoints))) as threads:
        results = dict(zip(endpoints, threads.map(attempt, endpoints.values()), strict=True))
    connected = {
        rank: result for rank, result in results.items() if isinstance(result, socket.socket)
    }
    return connected, {rank: reason for rank, reason in results.items() if isinstance(reason, str)}


def _address_of(device: str) -> str:
    """The IPv4 address of a device, or its first IPv6 address; "" if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            ifreq = fcntl.ioctl(any_socket, _GET_ADDRESS, _IFREQ.pack(device.encode()[:15]))
        except OSError as error:
            if error.errno != errno.ENODEV:
                return _ipv6_address_of(device)
            devices = ", ".join(name for _, name in socket.if_nameindex())
            raise BackendUnavailable(
                f"{DEVICE_VARIABLE}={device}: this machine ({socket.gethostname()}) has no such network device: "
                f"{devices}"
            ) from error
    return socket.inet_ntoa(ifreq[20:24])


def _ipv6_address_of(device: str) -> str:
    with contextlib.suppress(OSError):  # this kernel has no IPv6
        for address, *_, name in map(
            str.split, _IPV6_ADDRESSES.read_text(encoding="utf-8").splitlines()
        ):
            text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
            if name == device:
                return f"{text}%{device}" if ip_address(text).is_link_local else text
    return ""


def _addresses_of_host() -> list[str]:
    """The addresses of this host's name, in gloo's order; the last one always works on this host."""
    infos: list[Any] = []
    with contextlib.suppress(OSError):
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    return [*(str(address[0]) for *_, address in infos), _LOOPBACK]


def _device_with(address: str) -> str:
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), "")
