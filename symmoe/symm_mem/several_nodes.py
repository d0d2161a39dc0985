"""What a heap has if its group spans several nodes: meetings and exchanges with other nodes, and who is where.

A heap of one node has none of it, and asks nothing here; its errors ask :class:`faults.OneNode`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from symmoe.errors import BackendUnavailable, SymmoeError, raise_for
from symmoe.kernels import control
from symmoe.kernels.control import Peers
from symmoe.nodes.lane import Lane
from symmoe.nodes.nccl import Nccl, NcclRail
from symmoe.nodes.rail import GlooRail, Messages, Payload
from symmoe.nodes.reach import DEVICE_VARIABLE, Endpoint, Listener, unreachable
from symmoe.nodes.topology import Topology, make_rank_maps
from symmoe.symm_mem.bootstrap import Bootstrap
from symmoe.symm_mem.faults import Faults
from symmoe.symm_mem.rail_peers import RailPeers
from symmoe.symm_mem.streams import Access

_REACH_S = 10.0  # for connections: three tries, as Linux does them
_HINT = f"{DEVICE_VARIABLE} on each node names its network device; firewalls must let all ports pass"


class Nodes:
    """The nodes of a heap, from one rank's point of view. For heaps that span several.

    Attributes:
        topology: which ranks are on which node.
        maps: the same, as tensors on the device.
        rail_peers: the ranks of this rank's rail.
    """

    def __init__(self, topology: Topology, peers: Peers, access: Access, faults: Faults, rail_peers: RailPeers) -> None:
        self.topology, self.maps = topology, make_rank_maps(topology, peers.bases.device)
        self._access, self._faults, self.rail_peers = access, faults, rail_peers
        rail_peers.watch(faults.note_overdue)

    @property
    def num_meetings(self) -> int:
        """Meetings of this rank's rail so far: it is the same for the ranks on it."""
        return self.rail_peers.lane.number

    @property
    def failed_so_far(self) -> torch.Tensor:
        """int64 [] on the device: not 0 if the call has failed here, or on a node of which this rank has heard."""
        return self.rail_peers.failed_so_far

    def meet(self, phase: int, *, sizes: int = 0, num_tokens: int = 0, **agreed: int) -> list[int]:
        """The host waits for those of the ranks with this rank's index on the other nodes, bounded a little longer than
        a barrier is. Collective over the group. If the last barrier of a call comes right after a meeting, an error of
        any rank before that gets to all ranks of all nodes. Does not wait for the device.

        Args:
            sizes: a number on which these ranks must agree, as on the other arguments: of what says how long messages
                are.
            num_tokens: of this rank, if the others have to know.
            phase, agreed: as in :meth:`SymmetricHeap.barrier`.

        Returns:
            by node, the num_tokens of the rank with this rank's index.
        """
        call = control.pack_call(phase=phase, **agreed)
        with self._access:
            raise_for(self._faults.after_meeting(self.rail_peers.meet(call, sizes, num_tokens), call))
            return self.rail_peers.num_tokens

    def exchange(self, sends: Messages, receives: Messages, phase: int, **options: int) -> list[int]:
        """Meets as :meth:`meet` does, then sends tensors to every other node, and receives what it sends. On GPUs that
        is work of the current stream. What is received may be used as it is only after the next barrier, or where
        :attr:`failed_so_far` is 0.

        Args:
            sends, receives: by message, and in it by node; contiguous, and of sizes that fit each other. Tensors for
                this node itself do not travel.
            phase, options: of :meth:`meet`, whose result this returns.
        """
        with self._access:
            num_tokens = self.meet(phase, **options)
            with self.moving(sends, receives):
                pass
        return num_tokens

    @contextmanager
    def moving(self, sends: Messages, receives: Messages) -> Iterator[Callable[[], None]]:
        """A context in which tensors travel as in :meth:`exchange`, after :meth:`meet`, while the host, and on GPUs the
        current stream, do other things. Collective over the group; one at a time. By the end of the context all have
        come, also after an exception, unless a peer is gone.

        Yields:
            a function that waits for them, on GPUs for later work of the current stream.
        """
        with self._access:
            report = self.rail_peers.begin(sends, receives)
            raise_for(None if report is None else self._faults.gone(report))
        is_moving = True

        def end(*, hears: bool) -> None:
            nonlocal is_moving
            if is_moving:
                is_moving = False
                with self._access:
                    raise_for(self._end(hears=hears))

        wait = partial(end, hears=True)
        try:
            yield wait
        except BaseException:
            with suppress(SymmoeError):  # of a peer that is gone: what led here is raised
                end(hears=False)
            raise
        wait()

    def _end(self, *, hears: bool) -> SymmoeError | None:
        """Waits for what has begun to move; what this rank raises, or None. hears: whether the next barrier is entered
        with what peers knew of; after an exception that is of a call that is over."""
        if self._faults.poison is not None:  # what may still come has its memory until the rail ends
            self.rail_peers.branch.join()
            return None
        report = self.rail_peers.end()
        if report is not None:
            return self._faults.gone(report)
        if hears:
            self.rail_peers.hear()
        return None


def make_count_peers(peers: Peers, topology: Topology) -> Peers:
    """Of the count table, which has a row for each rank of the group: in place of a rank of another node, the rank with
    its index here."""
    local = [ranks.index(rank) for rank in range(peers.layout.num_rows) for ranks in topology.nodes if rank in ranks]
    return Peers(
        rank=topology.rank,
        num_ranks=peers.layout.num_rows,
        bases=peers.bases[torch.tensor(local, device=peers.bases.device)],
        views=tuple(peers.views[rank] for rank in local),
        layout=peers.layout,
    )


def start_rail(
    bootstrap: Bootstrap, topology: Topology, device: torch.device, timeout_s: float
) -> tuple[Lane, Payload]:
    """What hosts say to each other on this rank's rail, and what moves tensors of `device`. Collective over the group.

    Args:
        timeout_s: bound of the waits of `bootstrap`. Connections of hosts have half of it, and those of GPUs, so that
            ranks which have theirs still wait when others give up.

    Raises:
        BackendUnavailable: on every rank, if two ranks cannot connect. The text names them, and what to look at.
    """
    _check_reach(bootstrap, topology, min(_REACH_S, timeout_s / 2))
    token = bootstrap.gather(os.urandom(16).hex())[0]
    name, store = f"symmoe/{token}/{topology.local_rank}", bootstrap.store
    node, num_nodes = topology.node, topology.num_nodes
    options: dict[str, Any] = {"node": node, "num_nodes": num_nodes, "timeout_s": timeout_s / 2}
    of_hosts = {**options, "timeout_s": timeout_s / 4}  # there are two
    rail, last_words = bootstrap.attempt(
        lambda: [_make_rail(topology, store, each, of_hosts) for each in (name, f"{name}/last words")]
    )
    try:
        payload = _make_payload(bootstrap, device, rail, store, f"{name}/payload", options)
    except SymmoeError:
        for each in (rail, last_words):
            each.abort()
        raise
    return Lane(rail, last_words, node=node, num_nodes=num_nodes), payload


def _check_reach(bootstrap: Bootstrap, topology: Topology, timeout_s: float) -> None:
    """Raises on all ranks if two ranks of a rail cannot connect. Collective."""
    with bootstrap.attempt(Listener) as listener:
        said = bootstrap.gather(asdict(listener.endpoint))
        others = {rank: Endpoint(**said[rank]) for rank in topology.rail if rank != topology.rank}
        refused, problem = unreachable(others, timeout_s), None
        if refused:
            (rank, why), *_ = refused.items()
            problem = BackendUnavailable(
                f"rank {topology.rank} on node {topology.node} cannot connect to rank {rank} on node "
                f"{topology.node_of(rank)} at {others[rank]}: {why}; {_HINT}"
            )
        bootstrap.agree(problem)


def _make_rail(topology: Topology, store: Any, name: str, options: dict[str, Any]) -> GlooRail:
    try:
        return GlooRail(store, name, **options)
    except RuntimeError as error:
        reason = str(error).split("\n", 1)[0]
        text = f"rank {topology.rank} on node {topology.node} does not connect to its rail, ranks {topology.rail}"
        raise BackendUnavailable(f"{text}: {reason}; {_HINT}") from error


def _make_payload(
    bootstrap: Bootstrap, device: torch.device, rail: GlooRail, store: Any, name: str, options: dict[str, Any]
) -> Payload:
    if device.type == "cpu":
        return rail
    library = bootstrap.attempt(Nccl)  # together: a rank without it would keep the others waiting
    made: list[NcclRail] = []
    try:
        bootstrap.attempt(lambda: made.append(NcclRail(library, store, name, **options)))
    except SymmoeError:
        for each in made:
            each.end()
        raise
    return made[0]
