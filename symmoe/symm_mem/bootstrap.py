"""Fixed-size messages over a process group: what the heap needs before it has memory of its own. No pickle."""

from __future__ import annotations

import torch
import torch.distributed as dist

from symmoe.errors import FAULT_BYTES, SymmoeError, decode, encode


class Bootstrap:
    """The EP group as plain bytes. Every method is collective over the group, and waits as long as the group does.

    `group=None` without an initialised process group is a group of one.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._alone = group is None and not dist.is_initialized()
        self._group = group
        self.rank = 0 if self._alone else dist.get_rank(group)
        self.num_ranks = 1 if self._alone else dist.get_world_size(group)

    def all_gather_bytes(self, payload: bytes, *, num_bytes: int) -> list[bytes]:
        """Every rank's `payload`, zero-padded to `num_bytes`, in rank order."""
        if len(payload) > num_bytes:
            raise AssertionError(f"a payload of {len(payload)} bytes does not fit {num_bytes}")
        padded = payload.ljust(num_bytes, b"\0")
        if self._alone:
            return [padded]
        mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(self._message_device())
        theirs = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(theirs, mine, group=self._group)
        return [bytes(t.cpu().numpy().tobytes()) for t in theirs]

    def agree(self, problem: SymmoeError | None) -> None:
        """Raises the first rank's problem on every rank; returns if nobody has one."""
        mine = b"" if problem is None else encode(problem)
        for rank, payload in enumerate(self.all_gather_bytes(mine, num_bytes=FAULT_BYTES)):
            if payload.strip(b"\0"):
                raise decode(payload, rank=rank)

    def barrier(self) -> None:
        """Every rank has arrived."""
        self.all_gather_bytes(b"", num_bytes=8)

    def _message_device(self) -> torch.device:
        # A group with any CPU backend takes CPU tensors; an NCCL-only group takes tensors on its GPU.
        if "cpu" in dist.get_backend_config(self._group) or dist.get_backend(self._group) == "gloo":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())
