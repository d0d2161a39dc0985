"""Whether ranks on several nodes can connect to each other: asked before gloo tries.

Of two ranks gloo has one connect and the other wait. Where a connection is refused, the one that waits does so for
five times the bound, and neither says with whom. So each rank listens where gloo is going to, and its rail peers try to
connect: the kernels of the two machines answer, and no byte is sent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from symmoe.errors import BackendUnavailable

DEVICE_VARIABLE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR: the IPv4 address of a device, in 4 bytes after the first 20 of a struct ifreq
_IFREQ = struct.Struct("16s16x8x")
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a rank listens."""

    device: str  # name of the network device; "": not known
    host: str = ""
    port: int = 0  # 0: nobody listens, as the address of the device is not known

    @property
    def is_loopback(self) -> bool:
        """Whether only its own machine reaches it."""
        return bool(self.host) and ip_address(self.host.partition("%")[0]).is_loopback

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" + (f" ({self.device})" if self.device else "")


class Listener:
    """Listens at `endpoint`, where gloo does: at the device that GLOO_SOCKET_IFNAME names, or at the address of the
    host's name. A context manager; the peers have to have tried before it ends.

    Raises:
        BackendUnavailable: there is no such device.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        device = os.environ.get(DEVICE_VARIABLE, "").split(",")[0]
        address = _address_of(device) if device else _address_of_host()
        self.endpoint = Endpoint(device)
        if address:
            with contextlib.suppress(OSError):  # then it is not known here; gloo says what it has against it
                self._socket = socket.create_server((address, 0), family=_family(address), backlog=socket.SOMAXCONN)
                self.endpoint = Endpoint(device or _device_with(address), address, self._socket.getsockname()[1])

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._socket is not None:
            self._socket.close()


def unreachable(others: Mapping[int, Endpoint], timeout_s: float) -> dict[int, str]:
    """Why this rank cannot connect to some of the others, by rank; {}: it can to all that listen. Local; takes at most
    timeout_s."""
    problems: dict[int, str] = {}
    with selectors.DefaultSelector() as waiting:
        for rank, endpoint in others.items():
            if not endpoint.port:
                continue
            each = socket.socket(_family(endpoint.host), socket.SOCK_STREAM)
            each.setblocking(False)
            code = each.connect_ex((endpoint.host, endpoint.port))
            if code in (0, errno.EINPROGRESS):
                waiting.register(each, selectors.EVENT_WRITE, rank)
            else:
                problems[rank] = os.strerror(code)
                each.close()
        deadline, left_s = time.monotonic() + timeout_s, timeout_s
        while waiting.get_map() and left_s > 0:
            left_s = deadline - time.monotonic()  # after the deadline once more: what came while nobody looked
            for key, _ in waiting.select(max(0.0, left_s)):
                each = key.fileobj  # type: ignore[assignment]
                if code := each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    problems[key.data] = os.strerror(code)
                waiting.unregister(each)
                each.close()
        for key in [*waiting.get_map().values()]:
            problems[key.data] = f"no answer within {timeout_s:g} s"
            key.fileobj.close()  # type: ignore[union-attr]
    return problems


def _address_of(device: str) -> str:
    """The IPv4 address of a device; "" if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            found = fcntl.ioctl(any_socket, _GET_ADDRESS, _IFREQ.pack(device.encode()[:15]))
        except OSError as error:
            if error.errno != errno.ENODEV:
                return ""
            known = ", ".join(name for _, name in socket.if_nameindex())
            has = f"this machine ({socket.gethostname()}) has no such network device: {known}"
            raise BackendUnavailable(f"{DEVICE_VARIABLE}={device}: {has}") from error
    return socket.inet_ntoa(found[20:24])


def _address_of_host() -> str:
    """The first address of this host's name that is this host's."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return _LOOPBACK  # as gloo does
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as each:
                each.bind(address)
        except OSError:
            continue
        return str(address[0])
    return _LOOPBACK


def _device_with(address: str) -> str:
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), "")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
