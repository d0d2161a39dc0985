"""How a rank that gives up tells its peers: their waits for it end at once, see control.ABORT."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from symmoe.errors import FAULT_BYTES, SymmoeError, decode_text, encode
from symmoe.kernels import control
from symmoe.kernels.control import Peers

_WORD = struct.Struct("<q")
_DETAILS = struct.Struct("<qqqqq")  # missing, phase, expected, seen, first


@dataclass(frozen=True, slots=True)
class Report:
    """Why a rank gives up.

    Attributes:
        reason: in words.
        missing: the peer it has waited for in vain; -1: it has not, the trouble is its own.
        phase, expected, seen: where, and the epochs, as in a status record.
        first: 1 if that wait was bounded by start_timeout_s, see FirstTimes.
    """

    reason: str
    missing: int = -1
    phase: int = 0
    expected: int = 0
    seen: int = 0
    first: int = 0


def tell_peers(peers: Peers, report: Report, *, turn: int, kept_bits: int) -> None:
    """Ends every wait of the group, this rank's own included. Local: waits for nobody.

    Args:
        turn: which of the two slots of the fault inboxes may be written.
        kept_bits: of the epochs that have been sent. control.EPOCH_MASK: what has come counts. 0: nothing does, as it
            must be if this rank has sent an epoch whose end it has not seen: a late peer would take it for a success.
    """
    word = _word(peers.rank)
    details = _DETAILS.pack(report.missing, report.phase, report.expected, report.seen, report.first)
    message = bytearray(_WORD.pack(word) + encode(SymmoeError(report.reason)) + details)
    payload = torch.frombuffer(message, dtype=torch.uint8)
    # First of all: barriers that this rank has still on its stream would send epochs over what is written here.
    counters = peers.region(peers.rank, peers.layout.counters, (control.NUM_COUNTERS,), torch.int64)
    counters[control.ABORTED] = 1
    for rank in range(peers.num_ranks):
        inbox = peers.region(rank, peers.layout.fault_inbox, (2, peers.num_ranks, control.INBOX_BYTES), torch.uint8)
        inbox[turn, peers.rank, : payload.numel()].copy_(payload)
    for rank in range(peers.num_ranks):  # after the report: whoever sees these finds it
        mailbox = peers.region(rank, peers.layout.mailbox, (2, peers.num_ranks, control.MAIL_WORDS), torch.int64)
        signals = peers.region(rank, peers.layout.signals, (peers.num_ranks, control.SIGNAL_WORDS), torch.int64)
        for words in (mailbox[:, :, 0], signals[:, 0]):
            # Not atomic: an epoch that its owner sends just now may get lost, and its rank counts as not arrived.
            words.copy_((words & kept_bits) | word)


def read_report(peers: Peers, sender: int) -> Report:
    """What rank `sender` has told this one."""
    inbox = peers.region(peers.rank, peers.layout.fault_inbox, (2, peers.num_ranks, control.INBOX_BYTES), torch.uint8)
    for slot in inbox[:, sender].cpu():
        message = slot.numpy().tobytes()
        if _WORD.unpack_from(message)[0] == _word(sender):
            reason = decode_text(message[_WORD.size : _WORD.size + FAULT_BYTES])
            return Report(reason, *_DETAILS.unpack_from(message, control.INBOX_DETAILS))
    return Report("it has not said why")


def _word(rank: int) -> int:
    return control.ABORT + (rank << control.ABORT_RANK_SHIFT)
