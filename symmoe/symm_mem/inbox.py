"""What ranks tell each other when something has gone wrong: messages in the fault inboxes of the control block.

What a rank writes and reads when it gives up are copies from and to the host's memory: to load a new kernel CUDA may
wait until none runs (lazy loading), and one that runs may wait for a lost rank until it hears of what is written here.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass

import torch

from symmoe.errors import FAULT_BYTES, SymmoeError, decode, decode_text, encode
from symmoe.kernels import control
from symmoe.kernels.control import Peers

_WORD = struct.Struct("<q")  # the epoch of a failed call, or the word of a rank that gives up
_DETAILS = struct.Struct("<qqqqqqq")  # the integers of a Report; of a Fault, its origin


@dataclass(frozen=True, slots=True)
class Report:
    """Why a rank gives up.

    Attributes:
        reason: in words.
        missing: the peer that did not come (rank in the EP group); -1: none, the rank itself failed.
        phase, expected, seen: phase and epochs of the wait, as in a status record.
        first: 1 if that wait was bounded by start_timeout_s, see FirstTimes.
        sender: the rank that gave up first (in the EP group), if another one passes on what it has said; else -1.
        lost: 1 if the connection to the missing peer has closed.
    """

    reason: str
    missing: int = -1
    phase: int = 0
    expected: int = 0
    seen: int = 0
    first: int = 0
    sender: int = -1
    lost: int = 0

    def pack(self) -> bytes:
        """FAULT_BYTES and the details."""
        reason, *details = astuple(self)
        return encode(SymmoeError(reason)) + _DETAILS.pack(*details)

    @classmethod
    def unpack(cls, message: bytes) -> Report:
        """The report that was packed."""
        return cls(decode_text(message), *_DETAILS.unpack_from(message, FAULT_BYTES))


UNKNOWN = 1 << 31  # the origin of an error of which a rank knows only that there is one, on another node


@dataclass(frozen=True, slots=True)
class Fault:
    """An error by which a rank has failed a call, as it travels.

    Attributes:
        origin: the rank (in the EP group); -1: no rank in particular, all have found it; or UNKNOWN.
        message: the encoded error.
        is_unraised: whether who tells it has left the call and keeps it for the next plan; of what a rail has met with,
            whether all ranks on it do.
    """

    origin: int
    message: bytes
    is_unraised: bool = False

    @property
    def error(self) -> SymmoeError:
        """The error as other ranks raise it."""
        return decode(self.message, rank=-1 if self.origin == UNKNOWN else self.origin)


def counters(peers: Peers) -> torch.Tensor:
    """This rank's counters, int64 [NUM_COUNTERS]."""
    return peers.region(peers.rank, peers.layout.counters, (control.NUM_COUNTERS,), torch.int64)


def mailbox(peers: Peers, rank: int) -> torch.Tensor:
    """Rank `rank`'s mailbox, int64 [2, R, MAIL_WORDS]."""
    return peers.region(rank, peers.layout.mailbox, (2, peers.num_ranks, control.MAIL_WORDS), torch.int64)


def write_word(place: torch.Tensor, value: int) -> None:
    """Writes a number, without a kernel."""
    place.copy_(torch.tensor(value, dtype=place.dtype, device="cpu"))


def send_fault(peers: Peers, fault: Fault, *, epoch: int, turn: int) -> None:
    """Puts the error by which this rank fails the call of `epoch` into every inbox. Local.

    Args:
        turn: which of the two slots of the inboxes is written. Peers have read the message before the last one.
    """
    _send(peers, _WORD.pack(epoch) + fault.message + _DETAILS.pack(fault.origin, *[0] * 6), turn)


def read_fault(peers: Peers, sender: int, *, epoch: int) -> Fault:
    """The error by which rank `sender` has failed the call of `epoch`. Waits for the current stream."""
    message = _read(peers, sender, epoch)
    if message is None:
        text = f"rank {peers.in_group(sender)} failed in epoch {epoch}, and has failed again since"
        if peers.group_ranks:
            text = "the call has failed on another node"
        return Fault(UNKNOWN if peers.group_ranks else -1, encode(SymmoeError(text)))
    origin, *_ = _DETAILS.unpack_from(message, control.INBOX_DETAILS)
    return Fault(origin, message[_WORD.size : control.INBOX_DETAILS])


def end_waits(peers: Peers, report: Report, *, turn: int, kept_bits: int) -> None:
    """Ends every wait of the group, this rank's own included: see control.ABORT. Local, waits for nobody.

    Args:
        turn: as in :func:`send_fault`.
        kept_bits: bits of sent epochs that are kept. control.EPOCH_MASK: epochs that have come count. 0: none count;
            needed if this rank has sent an epoch whose end it has not seen: a late peer would take it for a success.
    """
    word = _word_of(peers.rank)
    # This comes first: barriers still on this rank's stream would send epochs over these words.
    write_word(counters(peers)[control.ABORTED], 1)
    _send(peers, _WORD.pack(word) + report.pack(), turn)
    for rank in range(peers.num_ranks):  # after the report: a peer that sees these words finds it
        signals = peers.region(rank, peers.layout.signals, (peers.num_ranks, control.SIGNAL_WORDS), torch.int64)
        for slots in (*mailbox(peers, rank), signals):
            for slot, (sent, *_) in zip(slots, slots.tolist(), strict=True):
                # Not atomic: an epoch that a peer sends at the same time may get lost; that peer counts as not arrived.
                write_word(slot[0], (sent & kept_bits) | word)


def read_report(peers: Peers, sender: int) -> Report:
    """Why rank `sender` has given up. Waits for the current stream."""
    message = _read(peers, sender, _word_of(sender))
    if message is None:
        return Report("it has not said why")
    return Report.unpack(message[_WORD.size :])


def _word_of(rank: int) -> int:
    """The number that a rank which gives up adds to the epochs."""
    return control.ABORT + (rank << control.ABORT_RANK_SHIFT)


def _send(peers: Peers, message: bytes, turn: int) -> None:
    payload = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    for rank in range(peers.num_ranks):
        _inbox(peers, rank, peers.rank)[turn, : payload.numel()].copy_(payload)


def _read(peers: Peers, sender: int, word: int) -> bytes | None:
    """The message of rank `sender` that begins with this word."""
    for slot in _inbox(peers, peers.rank, sender).cpu():
        message: bytes = slot.numpy().tobytes()
        if _WORD.unpack_from(message)[0] == word:
            return message
    return None


def _inbox(peers: Peers, rank: int, sender: int) -> torch.Tensor:
    """uint8 [2, INBOX_BYTES]: what `sender` writes for `rank`."""
    shape = (2, peers.num_ranks, control.INBOX_BYTES)
    return peers.region(rank, peers.layout.fault_inbox, shape, torch.uint8)[:, sender]
