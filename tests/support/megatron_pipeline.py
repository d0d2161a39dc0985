"""What ranks run for the tests of Megatron's pipeline schedules. Everything runs on ranks.

A stage has `NUM_CHUNKS` chunks of the model (virtual stages) where the schedule is the interleaved one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import megatron_shim
import pytest
import torch
from megatron_cases import (
    BATCH,
    SEQUENCE,
    VOCABULARY,
    batch_of,
    check_equal,
    config_of,
    filled,
    forms_of,
    model_of,
    named_parameters,
    num_zeros,
    opened_heap,
    reference_spec,
    use_groups,
)

from symmoe.symm_mem.row_budget import RowHistory

NUM_MICRO_BATCHES = 4
NUM_CHUNKS = 2


def several_in_flight(rank: int, num_ranks: int, *, fields: dict[str, Any]) -> None:
    """Three micro-batches, two of them in flight (forward, forward, backward, forward, backward, backward)."""
    use_groups(ep=2)
    config = config_of(**fields)
    found = {}
    with opened_heap() as heap:
        for form, form_spec in forms_of(reference_spec(config), heap).items():
            model = model_of(config, form_spec)
            batches = [_changed_batch(step) for step in range(3)]
            waiting = [model(**batches[0]).mean(), model(**batches[1]).mean()]
            waiting.pop(0).backward()
            waiting.append(model(**batches[2]).mean())
            while waiting:
                waiting.pop(0).backward()
            found[form] = {name: parameter.grad for name, parameter in named_parameters(model)}
    check_equal(found)


def pipelined(rank: int, num_ranks: int, *, ep: int, num_chunks: int | None, fields: dict[str, Any]) -> None:
    """Micro-batches through two stages by Megatron's own schedule: 1F1B, or with chunks the interleaved one.

    Megatron frees what a stage has sent on, as its users have it do (deallocate_pipeline_outputs).
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = None  # of another shape in schedules than in a loop of one's own
    use_groups(ep=ep, pp=2, num_chunks=num_chunks)
    config = config_of(
        num_layers=2 * 2 * (num_chunks or 1),  # two of every chunk
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=num_chunks,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        **fields,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    found = {}
    with opened_heap() as heap:
        for form, form_spec in forms_of(reference_spec(config), heap).items():
            chunks = _chunks(config, form_spec, stage, num_stages=2)
            with megatron_shim.CudaIsCpu():
                reports = get_forward_backward_func()(**_micro_batches_of(chunks), forward_only=False)
            found[form] = {name: parameter.grad for name, parameter in named_parameters(torch.nn.ModuleList(chunks))}
            found[form] |= {f"losses {i}": report["loss"] for i, report in enumerate(reports)}
            assert heap.leased_bytes == 0
            assert len(reports) == (NUM_MICRO_BATCHES if stage == 1 else 0)
    check_equal(found)
    assert num_zeros(found["megatron"]) <= 4


def heap_of_stage(
    rank: int, num_ranks: int, *, stage: int, num_stages: int, layers_per_chunk: int, group_size: int, recompute: bool
) -> None:
    """One stage of an interleaved pipeline needs the planned heap, by Megatron's own schedule, at EP `num_ranks`.

    All ranks are of that stage. What other stages would send is made up: it changes numbers, and here every lease has
    the same size whatever the numbers are.
    """
    from symmoe.errors import HeapExhausted
    from symmoe.integrations.megatron import DispatchOptions, heap_bytes, open_heap, use_symmoe
    from symmoe.symm_mem.memory import ALIGNMENT_BYTES

    use_groups(ep=num_ranks)
    recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = config_of(
        num_layers=num_stages * NUM_CHUNKS * layers_per_chunk,
        pipeline_model_parallel_size=num_stages,
        virtual_pipeline_model_parallel_size=NUM_CHUNKS,
        microbatch_group_size_per_vp_stage=group_size,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        moe_ffn_hidden_size=512,  # wide enough for rows in the layout that heap_bytes counts with
        **(recomputed if recompute else {}),
    )
    in_flight = min(2 * (num_stages - 1 - stage) + (NUM_CHUNKS - 1) * group_size + 1, NUM_CHUNKS * NUM_MICRO_BATCHES)
    num_layers = 1 if recompute else in_flight * layers_per_chunk
    num_tokens = SEQUENCE * BATCH
    planned = heap_bytes(config, num_tokens=num_tokens, num_layers=num_layers)
    too_small = pytest.raises(HeapExhausted, match="lease '")
    for num_bytes, outcome in ((planned, nullcontext()), (planned - ALIGNMENT_BYTES, too_small)):
        with open_heap(num_bytes) as heap:
            options = DispatchOptions(capacity=_room(num_tokens * num_ranks * config.moe_router_topk))
            spec = use_symmoe(reference_spec(config), heap, options=options)
            chunks = _chunks(config, spec, stage, num_stages)
            with outcome:
                _run_stage(config, chunks, stage, num_stages)


def _room(num_rows: int) -> int:
    """Rows that a call gets if the fullest rank of the one before it had so many."""
    history = RowHistory()
    history.note(1, num_rows, num_rows)
    return history.room(1, None).rows


def _chunks(config: Any, spec: Any, stage: int, num_stages: int) -> list[Any]:
    """The parts of a GPTModel that a stage has, with numbers that depend on the names of their parameters alone."""
    from megatron.core.models.gpt import GPTModel

    num_chunks = config.virtual_pipeline_model_parallel_size
    chunks = torch.nn.ModuleList(
        GPTModel(
            config,
            spec,
            VOCABULARY,
            SEQUENCE,
            pre_process=stage == number == 0,
            post_process=stage == num_stages - 1 and number == (num_chunks or 1) - 1,
            vp_stage=None if num_chunks is None else number,
        )
        for number in range(num_chunks or 1)
    )
    return list(filled(chunks))


def _forward_step(steps: Iterator[int], model: Any) -> tuple[torch.Tensor, Any]:
    losses = model(**_changed_batch(next(steps)))
    return losses, lambda losses: (losses.mean(), {"loss": losses.detach().clone()})


def _run_stage(config: Any, chunks: list[Any], stage: int, num_stages: int) -> None:
    """Megatron's interleaved schedule on a stage that has no others around it."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_with_interleaving
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    class NoNeighbours(P2PCommunicator):
        """Receives random numbers; what is sent goes nowhere."""

        def __init__(self) -> None:
            self.config = config
            self.virtual_pipeline_model_parallel_size = NUM_CHUNKS
            self.pp_group = SimpleNamespace(rank=lambda: stage, size=lambda: num_stages)

        def _communicate(self, *, recv_prev: bool, recv_next: bool, tensor_shape: Any, **others: Any) -> Any:
            received = (torch.randn(tensor_shape, requires_grad=True) if of else None for of in (recv_prev, recv_next))
            return (*received, None)

    groups = get_default_pg_collection()
    groups.embd = groups.pos_embd = None
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
    with megatron_shim.CudaIsCpu():
        forward_backward_pipelining_with_interleaving(
            **_micro_batches_of(chunks), p2p_communicator=NoNeighbours(), pg_collection=groups
        )


def _micro_batches_of(chunks: list[Any]) -> dict[str, Any]:
    """The arguments of Megatron's schedules that say what they run."""
    return {
        "forward_step_func": _forward_step,
        "data_iterator": [iter(range(NUM_MICRO_BATCHES)) for _ in chunks],
        "model": chunks,
        "num_microbatches": NUM_MICRO_BATCHES,
        "seq_length": SEQUENCE,
        "micro_batch_size": BATCH,
    }


def _changed_batch(step: int) -> dict[str, torch.Tensor]:
    batch = batch_of()
    for name in ("input_ids", "labels"):
        batch[name] = (batch[name] * (2 * step + 3) + step) % VOCABULARY
    return batch
