"""Messages between ranks after an error, and the typed errors made from messages and from kernels' integers.

Messages lie in the fault inboxes of the control block. A rank that aborts writes and reads by copies from and to the
host's memory, not by kernels: CUDA may load a new kernel only when none runs (lazy loading), and a running kernel may
wait for a lost rank until it receives the message.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch

from symmoe.errors import (
    FAULT_BYTES,
    CapacityError,
    ConfigMismatch,
    ExpertIdError,
    SymmoeError,
    decode,
    decode_text,
    encode,
)
from symmoe.kernels import control
from symmoe.symm_mem.bootstrap import Bootstrap

_WORD = struct.Struct("<q")  # the epoch of a failed call, or the word of an aborting rank
_DETAILS = struct.Struct("<qqqqqqq")  # the integers of a Report; of a Fault, its origin
_LOOK_UP = timedelta(seconds=2)  # a rank stores a configuration's text before it uses the number

# The tuples into which fields of a call (control.CALL_FIELDS) are indices.
CHOICES: dict[str, Sequence[object]] = {
    "dtype": control.DTYPES,
    "order": control.ORDERS,
    "gradients": control.GRADIENTS,
    "layout": control.LAYOUTS,
    "schedule": control.SCHEDULES,
    **dict.fromkeys(("probs", "replicas"), ("without", "with")),
}

# Names of the values of header words.
_HEADER_NAMES: dict[int, Sequence[str]] = {
    control.HEAD_DTYPE: [*map(str, control.DTYPES)],
    control.HEAD_QUANTIZED_WIRE: [*map(repr, control.QUANTIZED_WIRES)],
    control.HEAD_OVERFLOW: ("'raise'", "'drop'", "'raise'"),  # by OVERFLOW_*
}


class Report(NamedTuple):
    """The reason why a rank aborts, as text and integers for the rank's peers."""

    reason: str
    missing: int = -1  # the missing peer (rank in the EP group); -1: none, the rank itself failed
    phase: int = 0  # of the wait, and its epochs, as in a status record
    expected: int = 0
    seen: int = 0
    first: int = 0  # 1: start_timeout_s bounded the wait, see StartupGrace
    sender: int = (
        -1
    )  # the first rank that aborted (in the EP group), if another rank forwards its report
    lost: int = 0  # 1: the connection to the missing peer has closed

    def pack(self) -> bytes:
        """The report as FAULT_BYTES and the details."""
        reason, *details = self
        return encode(SymmoeError(reason)) + _DETAILS.pack(*details)

    @classmethod
    def unpack(cls, message: bytes) -> Report:
        """The report from packed bytes."""
        return cls(decode_text(message), *_DETAILS.unpack_from(message, FAULT_BYTES))


UNKNOWN = 1 << 31  # the origin of an error on another node of which a rank has no other record


class Fault(NamedTuple):
    """An error by which a rank has failed a call, in the form for its peers.

    Attributes:
        origin: the rank (in the EP group); -1: all ranks have found the error; or UNKNOWN.
        message: the encoded error.
        is_unraised: whether the sender has left the call and keeps the error for the next plan; of a rail's fault,
            whether all its ranks do.
    """

    origin: int
    message: bytes
    is_unraised: bool = False

    @property
    def error(self) -> SymmoeError:
        """The error as other ranks raise it."""
        return decode(self.message, rank=-1 if self.origin == UNKNOWN else self.origin)


def write_word(word: torch.Tensor, value: int) -> None:
    """Writes a number, without a kernel."""
    word.copy_(torch.tensor(value, dtype=word.dtype, device="cpu"))


def send_fault(peers: control.Peers, fault: Fault, *, epoch: int, turn: int) -> None:
    """Writes the error by which this rank fails the call of `epoch` into every inbox. Local. turn: the slot of the
    inboxes, 0 or 1; peers have read the message before the last one."""
    _send(peers, _WORD.pack(epoch) + fault.message + _DETAILS.pack(fault.origin, *[0] * 6), turn)


def read_fault(peers: control.Peers, sender: int, *, epoch: int) -> Fault:
    """The error by which rank `sender` failed the call of `epoch`. Waits for the current stream."""
    message = _read(peers, sender, epoch)
    if message is None:
        text = f"rank {peers.in_group(sender)} failed in epoch {epoch}, and has failed again since"
        if peers.group_ranks:
            text = "the call has failed on another node"
        return Fault(UNKNOWN if peers.group_ranks else -1, encode(SymmoeError(text)))
    origin, *_ = _DETAILS.unpack_from(message, control.INBOX_DETAILS)
    return Fault(origin, message[_WORD.size : control.INBOX_DETAILS])


def end_waits(peers: control.Peers, report: Report, *, turn: int, kept_bits: int) -> None:
    """Ends every wait of the group, this rank's own included: see control.ABORT. Local, does not wait. turn: as in
    :func:`send_fault`. kept_bits: bits of sent epochs that are kept. control.EPOCH_MASK: received epochs count. 0: none
    count, as is needed if this rank has sent an epoch whose end it has not seen: a late peer would continue."""
    word = _word_of(peers.rank)
    # The flag is set first: barriers still on this rank's stream would send epochs over the next words.
    write_word(peers.counters(peers.rank)[control.ABORTED], 1)
    _send(peers, _WORD.pack(word) + report.pack(), turn)
    for rank in range(peers.num_ranks):  # after the report: a peer that sees these words finds it
        for slots in (*peers.mailbox(rank), peers.signals(rank)):
            for slot, (sent, *_) in zip(slots, slots.tolist(), strict=True):
                # Not atomic: an epoch that a peer sends at the same time may get lost; that peer counts as not arrived.
                write_word(slot[0], (sent & kept_bits) | word)


def read_report(peers: control.Peers, sender: int) -> Report:
    """The reason why rank `sender` has aborted. Waits for the current stream."""
    message = _read(peers, sender, _word_of(sender))
    return (
        Report("it has not said why") if message is None else Report.unpack(message[_WORD.size :])
    )


def _word_of(rank: int) -> int:
    """The number that an aborting rank adds to the epochs."""
    return control.ABORT + (rank << control.ABORT_RANK_SHIFT)


def _send(peers: control.Peers, message: bytes, turn: int) -> None:
    payload = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    for rank in range(peers.num_ranks):
        _inbox(peers, rank, peers.rank)[turn, : payload.numel()].copy_(payload)


def _read(peers: control.Peers, sender: int, word: int) -> bytes | None:
    """The message of rank `sender` that begins with this word."""
    for slot in _inbox(peers, peers.rank, sender).cpu():
        message: bytes = slot.numpy().tobytes()
        if _WORD.unpack_from(message)[0] == word:
            return message
    return None


def _inbox(peers: control.Peers, rank: int, sender: int) -> torch.Tensor:
    """uint8 [2, INBOX_BYTES]: the messages from `sender` to `rank`."""
    return peers.region(
        rank,
        peers.layout.fault_inbox,
        (2, peers.num_ranks, control.INBOX_BYTES),
        torch.uint8,
    )[:, sender]


class Configurations:
    """The configurations of a group's layers, and of replicas, by number. Barriers compare numbers; texts are read only
    for an error. They lie in the store of the process group, so that no rank waits for another to name a difference.
    Local."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self._texts: dict[int, str] = {}

    def number(self, fields: Mapping[str, object]) -> int:
        """The number of a configuration, not 0; equal ones have the same number on all ranks. Equal numbers, such as 1
        and 1.0, have the same text."""
        text = json.dumps({name: _shown(value) for name, value in fields.items()})
        number = (
            int(hashlib.sha256(text.encode()).hexdigest(), 16) % (1 << control.CONFIG_BITS) or 1
        )
        if number not in self._texts:
            self._texts[number] = text
            with suppress(RuntimeError, ValueError):  # no store any more
                if self._bootstrap.num_ranks > 1:
                    self._bootstrap.store.set(_key(number), text)
        return number

    def mismatch(
        self, first: int, number: int, peer: int, peer_number: int, where: str = ""
    ) -> ConfigMismatch:
        """The error of ranks `first` and `peer`, which have these numbers; number 0 stands for make_plan."""
        if not (number and peer_number):
            first_call, peer_call = (
                "that of a layer" if n else "make_plan" for n in (number, peer_number)
            )
            return ConfigMismatch(
                f"ranks are in different calls: rank {first} in {first_call}, rank {peer} in {peer_call}"
            )
        first_fields = self._fields(number)
        peer_fields = self._fields(peer_number)
        name = next(
            (
                name
                for name in first_fields
                if name in peer_fields and first_fields[name] != peer_fields[name]
            ),
            None,
        )
        if name is None:
            return ConfigMismatch(
                f"the configurations of a layer differ{where} on rank {first} and rank {peer}"
            )
        return _difference(name, where, first, first_fields[name], peer, peer_fields[name])

    def _fields(self, number: int) -> dict[str, str]:
        """The fields of a configuration of any rank; empty if they cannot be found."""
        text = self._texts.get(number)
        with suppress(RuntimeError, ValueError):
            if text is None:
                self._bootstrap.store.wait([_key(number)], _LOOK_UP)
                text = self._bootstrap.store.get(_key(number)).decode()
        return {} if text is None else dict(json.loads(text))


def _key(number: int) -> str:
    return f"symmoe/configuration/{number:x}"


def _shown(value: object) -> str:
    if isinstance(value, float):  # or a kind of it, e.g. numpy's
        value = int(value) if value.is_integer() else float(value)
    return "none" if value is None else repr(value)


def plan_record(report: list[int]) -> list[int]:
    """The status record of a plan with this report (control.SUM_*), as the plan's kernel would write it."""
    return [
        control.STATUS_PLAN,
        control.PHASE_PLAN,
        report[control.SUM_ERROR_RANK],
        report[control.SUM_LIMIT],
        report[control.SUM_VALUE],
        report[control.SUM_ERROR],
        report[control.SUM_WHERE],
        0,
    ]  # in the order of STATUS_*


def plan_error(words: list[int]) -> SymmoeError:
    """The error of a status record of kind STATUS_PLAN; the same on every rank."""
    rank, limit, value, code, where = words[control.STATUS_PEER : control.STATUS_WHERE + 1]
    if code == control.PLAN_MISMATCH:
        return ConfigMismatch(
            f"{control.AGREED_FIELDS[where]} differs: rank 0 has {_header_value(where, limit)}, "
            f"rank {rank} has {_header_value(where, value)}"
        )
    return {
        control.PLAN_FAULT: SymmoeError("the plan failed on another rank"),
        control.PLAN_BAD_ID: ExpertIdError(
            f"topk_idx on rank {rank}, flat position {where}: {value} is neither -1 nor in [0, {limit})"
        ),
        control.PLAN_OVERFLOW: CapacityError(
            f"rank {rank} is routed {value} rows, more than capacity ({limit})"
        ),
        control.PLAN_RAIL_OVERFLOW: CapacityError(
            f"rank {rank} sends {value} tokens to one other node, more than rail_capacity ({limit})"
        ),
    }[code]


def mismatch_error(
    configurations: Configurations, first: int, call: int, peer: int, other_call: int
) -> ConfigMismatch:
    """The error of two ranks (in the EP group), `first` and `peer`, that are in different calls (control.pack_call)."""
    first_fields = control.unpack_call(call)
    peer_fields = control.unpack_call(other_call)
    first_phase, peer_phase = (
        control.PHASES[fields["phase"]] for fields in (first_fields, peer_fields)
    )
    if first_phase != peer_phase:
        return ConfigMismatch(
            f"ranks are in different calls: rank {first} at '{first_phase}', rank {peer} at '{peer_phase}'"
        )
    field = next(
        (name for name in control.CALL_FIELDS if first_fields[name] != peer_fields[name]), "config"
    )
    is_of_plan = first_fields["phase"] in (control.PHASE_PLAN, control.PHASE_NODES_PLAN)
    where = "" if is_of_plan else f" at '{first_phase}'"
    if is_of_plan or (first_fields["replicas"] and field not in ("replicas", "plan")):
        return configurations.mismatch(
            first, call >> control.CONFIG_SHIFT, peer, other_call >> control.CONFIG_SHIFT, where
        )
    return _difference(field, where, first, str(first_fields[field]), peer, str(peer_fields[field]))


def _difference(
    field: str, where: str, first: int, first_value: str, peer: int, peer_value: str
) -> ConfigMismatch:
    """The error of ranks `first` and `peer` with different values of a field (in CHOICES: indices)."""
    if field in CHOICES and first_value.isdigit():
        first_value, peer_value = (
            str(CHOICES[field][int(index)]) for index in (first_value, peer_value)
        )
    return ConfigMismatch(
        f"{field} differs{where}: rank {first} has {first_value}, rank {peer} has {peer_value}"
    )


def _header_value(word: int, value: int) -> str:
    if value < 0:
        return "none"
    if word in _HEADER_NAMES:
        return _HEADER_NAMES[word][value]
    if word == control.HEAD_PRECISION:
        name = control.PRECISIONS[value & (1 << control.PRECISION_BITS) - 1]
        options = value >> control.PRECISION_BITS
        return f"{name} with options {options:#x}" if options else name
    return str(value)
