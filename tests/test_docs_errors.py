"""Every heading of docs/troubleshooting.md has a case here, which provokes the error, and then follows the fix.

What needs GPUs has a real case for them, and, where that is possible, one with the facts of such a machine made up.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster, RankFailure
from limits import HANG_S, PROMPT_S
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import symmoe
from symmoe import errors, timeline
from symmoe.checkpoint import ExpertShard, files, load_checkpoint, save_checkpoint
from symmoe.checkpoint.lock import locked
from symmoe.cli import main
from symmoe.integrations.parallel import parallelize
from symmoe.symm_mem import nvshmem
from symmoe.symm_mem.bootstrap import Bootstrap
from symmoe.tools.bench import stock

PAGE = Path(__file__).resolve().parent.parent / "docs" / "troubleshooting.md"
SHAPE = {"hidden": 32, "ffn": 16, "num_experts": 8, "top_k": 2}
OTHERS = {"RuntimeError", "AttributeError", "UserWarning"}  # sections that are not about an error of symmoe's
ANY = "..."  # in a text of the page: what differs from run to run

# Returns what was raised, after the fix has worked. On several ranks, a rank that raises something else returns None.
Provocation = Callable[..., tuple[str, str] | None]


@dataclass(frozen=True)
class Case:
    """How one error is provoked.

    Attributes:
        heading: of the page.
        provoke: on one rank called without arguments in the test's process, in a folder of its own; else on two ranks,
            with (rank, num_ranks).
        num_ranks: 1 or 2.
        on_gpus: needs as many GPUs.
    """

    heading: str
    provoke: Provocation
    num_ranks: int = 1
    on_gpus: bool = False

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        return [pytest.mark.gpu] if self.on_gpus else []


CASES: list[Case] = []


def alone(heading: str, **how: bool) -> Callable[[Provocation], Provocation]:
    return _registered(heading, num_ranks=1, **how)


def together(heading: str, **how: bool) -> Callable[[Provocation], Provocation]:
    return _registered(heading, num_ranks=2, **how)


def _registered(heading: str, **how: Any) -> Callable[[Provocation], Provocation]:
    def register(function: Provocation) -> Provocation:
        CASES.append(Case(heading, function, **how))
        return function

    return register


def raised_by(function: Callable[[], object], expected: type[Exception] = errors.SymmoeError) -> tuple[str, str]:
    """Name and text of the error that `function` must raise."""
    with pytest.raises(expected) as caught:
        function()
    return type(caught.value).__name__, str(caught.value)


def open_heap(num_bytes: int = 4 << 20, **options) -> symmoe.SymmetricHeap:
    return symmoe.SymmetricHeap(num_bytes=num_bytes, backend="host", **options)


@contextlib.contextmanager
def one_process_group() -> Iterator[None]:
    """A process group of this process alone."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def layer(heap: symmoe.SymmetricHeap, **options) -> symmoe.MoELayer:
    return symmoe.MoELayer(symmoe.MoEConfig(**SHAPE | options), heap)


# -- one rank ---------------------------------------------------------------------------------------------------------


@alone("Fields of a configuration do not fit together")
def experts_and_ranks() -> tuple[str, str]:
    found = raised_by(lambda: symmoe.MoEConfig(**SHAPE | {"num_experts": 2, "top_k": 4}))
    symmoe.MoEConfig(**SHAPE | {"num_experts": 4, "top_k": 4})
    return found


@alone("The heap is smaller than its own control block")
def heap_below_its_least_size() -> tuple[str, str]:
    found = raised_by(lambda: open_heap(1024))
    open_heap(symmoe.plan_memory(symmoe.MoEConfig(**SHAPE), num_ranks=1, num_tokens=16).heap_bytes).close()
    return found


@alone("The router's logits are not finite")
def logits_that_are_not_finite() -> tuple[str, str]:
    with open_heap() as heap:
        model, x = layer(heap), torch.zeros(4, 32)
        x[2, 5] = float("nan")
        found = raised_by(lambda: model(x))
        model(x.nan_to_num())
    return found


@alone("A layer is pickled")
def pickled_layer() -> tuple[str, str]:
    with open_heap() as heap:
        found = raised_by(lambda: torch.save(layer(heap), io.BytesIO()))
        saved = io.BytesIO()
        torch.save(layer(heap).state_dict(), saved)
        saved.seek(0)
        layer(heap).load_state_dict(torch.load(saved))
    return found


@alone("A buffer has another shape than the result")
def buffer_of_another_shape() -> tuple[str, str]:
    fc = symmoe.GroupedLinear(2, 32, 16)
    rows, splits = torch.ones(6, 32), torch.tensor([2, 4])
    found = raised_by(lambda: fc(rows, splits, out=torch.empty(6, 32)))
    fc(rows, splits, out=torch.empty(6, 16))
    return found


@alone("A buffer shares memory with something else")
def buffer_in_two_places() -> tuple[str, str]:
    linears = symmoe.Sequential(symmoe.GroupedLinear(2, 16, 16), symmoe.GroupedLinear(2, 16, 16))
    rows, splits, shared = torch.ones(6, 16), torch.tensor([2, 4]), torch.empty(6, 16)

    def call(first: torch.Tensor) -> torch.Tensor:
        return linears(rows, splits, splits, op_kwargs={0: {"out": first}, 1: {"out": shared}})

    found = raised_by(lambda: call(shared))
    call(torch.empty(6, 16))
    return found


@alone("A buffer that a spent graph has let go of")
def backward_twice() -> tuple[str, str]:
    with open_heap() as heap:
        plan = symmoe.make_plan(torch.tensor([[0], [1]]), num_experts=2, heap=heap)
        rows, _ = symmoe.dispatch_tokens(torch.ones(2, 16), plan)
        grad_out = heap.lease((2, 16), torch.float32).tensor

        def losses(*, retain_graph: bool) -> None:
            loss = symmoe.combine_tokens(rows.clone().requires_grad_(), plan, grad_out=grad_out).sum()
            loss.backward(retain_graph=retain_graph)
            loss.backward()

        found = raised_by(lambda: losses(retain_graph=False))
        losses(retain_graph=True)
    return found


@alone("An expert that does not exist")
def expert_id_out_of_range() -> tuple[str, str]:
    with open_heap() as heap:
        topk_idx = torch.tensor([[0, 1], [2, 8]])
        found = raised_by(lambda: symmoe.make_plan(topk_idx, num_experts=8, heap=heap))
        symmoe.make_plan(topk_idx.masked_fill(topk_idx == 8, -1), num_experts=8, heap=heap)
    return found


@alone("More rows than the capacity")
def more_rows_than_capacity() -> tuple[str, str]:
    with open_heap() as heap:
        x = torch.ones(16, 32)
        found = raised_by(lambda: layer(heap, capacity=24)(x))
        layer(heap, capacity=32)(x)
        layer(heap, capacity=24, overflow="drop")(x)
        layer(heap)(x)
    return found


@alone("The heap is too small")
def heap_too_small() -> tuple[str, str]:
    x = torch.ones(256, 32)
    with open_heap(64 << 10) as heap:
        found = raised_by(lambda: layer(heap)(x))
    plan = symmoe.plan_memory(
        symmoe.MoEConfig(**SHAPE), num_ranks=1, num_tokens=256, dtype=torch.float32, routing="worst"
    )
    with open_heap(plan.heap_bytes) as heap:
        layer(heap)(x)[0].sum().backward()
    return found


@alone("A layer runs after its heap was closed")
def use_after_close() -> tuple[str, str]:
    heap = open_heap()
    model, x = layer(heap), torch.ones(4, 32)
    model(x)
    heap.close()
    found = raised_by(lambda: model(x))
    with open_heap() as again:
        layer(again)(x)
    return found


@alone("A forked process calls the heap of its parent")
def call_in_a_fork() -> tuple[str, str]:
    with open_heap() as heap:
        model, x = layer(heap), torch.ones(4, 32)
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.write(write, "\n".join(raised_by(lambda: model(x))).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as stream:
            name, text = stream.read().split("\n", 1)
        os.waitpid(child, 0)
        model(x)
    return name, text.replace(str(os.getpid()), "4711").replace(str(child), "4712")


@alone("Two threads in a call on one heap")
def call_in_two_threads() -> tuple[str, str]:
    found: list[tuple[str, str]] = []
    with open_heap() as heap, open_heap() as other:
        model, x = layer(heap), torch.ones(4, 32)
        with heap.one_call():
            thread = threading.Thread(target=lambda: found.append(raised_by(lambda: model(x))), name="Thread-2")
            thread.start()
            thread.join()
            thread = threading.Thread(target=lambda: found.append(layer(other)(x)))
            thread.start()
            thread.join()
        model(x)
    assert found[1][0].shape == x.shape
    return found[0]


@alone("A heap larger than the memory of the machine")
def heap_larger_than_the_machine() -> tuple[str, str]:
    with pytest.warns(UserWarning, match="num_bytes") as warned, open_heap(num_bytes=1 << 44) as heap:
        layer(heap)(torch.ones(4, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_heap().close()
    return "UserWarning", str(warned[0].message)


@alone("A lease after its release")
def lease_after_release() -> tuple[str, str]:
    with open_heap() as heap:
        lease = heap.lease((4, 32), torch.float32, name="rows")
        lease.release()
        found = raised_by(lambda: lease.tensor)
        with heap.lease((4, 32), torch.float32, name="rows") as rows:
            rows.tensor.zero_()
    return found


@alone("A buffer whose lease was released")
def buffer_of_a_released_lease() -> tuple[str, str]:
    fc = symmoe.GroupedLinear(2, 32, 16)
    rows, splits = torch.ones(6, 32), torch.tensor([2, 4])
    with open_heap() as heap:
        lease = heap.lease((6, 16), torch.float32, name="out")
        out = lease.tensor
        lease.release()
        found = raised_by(lambda: fc(rows, splits, out=out))
        lease = heap.lease((6, 16), torch.float32, name="out")
        fc(rows, splits, out=lease.tensor)
        lease.release()
    return found


@alone("Combine before dispatch")
def combine_before_dispatch() -> tuple[str, str]:
    with open_heap() as heap:
        plan = symmoe.make_plan(torch.tensor([[0, 1], [2, 3]]), num_experts=8, heap=heap)
        found = raised_by(lambda: symmoe.combine_tokens(torch.ones(plan.num_rows, 32), plan))
        rows, _ = symmoe.dispatch_tokens(torch.ones(2, 32), plan)
        assert symmoe.combine_tokens(rows, plan).tolist() == [[2.0] * 32] * 2
    return found


@alone("Rows were overwritten before backward_dw")
def rows_overwritten_before_backward_dw() -> tuple[str, str]:
    fc = symmoe.GroupedLinear(2, 32, 16, delay_wgrad=True)
    splits = torch.tensor([2, 4])

    def step(early: bool) -> None:
        x = torch.ones(6, 32)
        fc(x, splits).sum().backward()
        if early:
            x.zero_()
        fc.backward_dw()
        x.zero_()

    found = raised_by(lambda: step(early=True))
    step(early=False)
    assert fc.weight.grad is not None
    return found


@alone("A checkpoint of another shape")
def checkpoint_of_another_model() -> tuple[str, str]:
    save_checkpoint("runs/a", 40, model=torch.nn.Linear(8, 4))
    found = raised_by(lambda: load_checkpoint("runs/a", model=torch.nn.Linear(8, 6)))
    assert load_checkpoint("runs/a", model=torch.nn.Linear(8, 4)).step == 40
    return found


@alone("A file of the checkpoint was changed")
def checkpoint_with_a_flipped_byte() -> tuple[str, str]:
    for step in (20, 40):
        save_checkpoint("runs/a", step, model=torch.nn.Linear(8, 4))
    (path,) = Path("runs/a/step-00000040").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = raised_by(lambda: load_checkpoint("runs/a", model=torch.nn.Linear(8, 4)))
    assert load_checkpoint("runs/a", model=torch.nn.Linear(8, 4), step=20).step == 20
    return found


@alone("No GPU")
def no_gpu_for_nvshmem() -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        found = raised_by(lambda: symmoe.SymmetricHeap(num_bytes=4 << 20, backend="nvshmem"))
        symmoe.SymmetricHeap(num_bytes=4 << 20).close()
    return found


@alone("A benchmark's result differs from its reference")
def benchmark_of_what_is_wrong() -> tuple[str, str]:
    sizes = "--hidden 16 --ffn 8 --experts 4 --top-k 2 --tokens 24 --repetitions 3".split()
    with pytest.MonkeyPatch.context() as patch:
        right = stock.swiglu
        patch.setattr(stock, "swiglu", lambda h, scale: right(h, scale * 1.1))
        found = raised_by(lambda: main(["bench", "layer", *sizes]))
    assert main(["bench", "layer", *sizes]) == 0
    return found


@alone("Gradients that FSDP has reduced already")
def dtensors_in_reduce_gradients() -> tuple[str, str]:
    with one_process_group(), open_heap(group=dist.group.WORLD) as heap:
        model = torch.nn.Sequential(layer(heap))
        parallelize(model, init_device_mesh("cpu", (1, 1), mesh_dim_names=("efsdp", "ep")))
        model(torch.ones(4, 32))[0].sum().backward()
        found = raised_by(lambda: symmoe.reduce_gradients(model))
        assert symmoe.clip_grad_norm(model, 1.0) > 0
    return found


@alone("A family of transformers that symmoe does not know")
def model_of_another_family() -> tuple[str, str]:
    transformers = pytest.importorskip("transformers")
    from symmoe.integrations.transformers import swap_moe

    sizes = {"vocab_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    moe = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 8, "num_key_value_heads": 2}
    with open_heap() as heap:
        other = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=16))
        found = raised_by(lambda: swap_moe(other, heap))
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **moe))
        swap_moe(model, heap)
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    return found


@alone("A recording that was not started")
def recording_without_start() -> tuple[str, str]:
    def record(start: bool) -> None:
        with timeline.record("step.json", heap) as recording:
            if start:
                recording.start()

    with open_heap() as heap:
        found = raised_by(lambda: record(start=False))
        record(start=True)
    assert Path("step.json").is_file()
    return found


@alone("No checkpoint there")
def no_checkpoint() -> tuple[str, str]:
    save_checkpoint("runs/a", 40, model=torch.nn.Linear(8, 4))
    found = raised_by(lambda: load_checkpoint("runs/b", model=torch.nn.Linear(8, 4)))
    assert load_checkpoint("runs/a", model=torch.nn.Linear(8, 4)).step == 40
    return found


@alone("No checkpoint of that step")
def no_checkpoint_of_a_step() -> tuple[str, str]:
    for step in (20, 40):
        save_checkpoint("runs/a", step, model=torch.nn.Linear(8, 4))
    found = raised_by(lambda: load_checkpoint("runs/a", model=torch.nn.Linear(8, 4), step=30))
    assert load_checkpoint("runs/a", model=torch.nn.Linear(8, 4), step=20).step == 20
    assert load_checkpoint("runs/a", model=torch.nn.Linear(8, 4)).step == 40
    return found


@alone("A parameter is missing in the checkpoint")
def checkpoint_of_the_bare_model() -> tuple[str, str]:
    save_checkpoint("runs/a", 40, model=torch.nn.Linear(8, 4))
    wrapped = torch.nn.Sequential(torch.nn.Linear(8, 4))
    found = raised_by(lambda: load_checkpoint("runs/a", model=wrapped))
    assert load_checkpoint("runs/a", model=wrapped[0]).step == 40
    return found


@alone("No state of an optimizer in the checkpoint")
def checkpoint_without_optimizer() -> tuple[str, str]:
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    save_checkpoint("runs/a", 40, model=model)
    found = raised_by(lambda: load_checkpoint("runs/a", model=model, optimizer=optimizer))
    assert load_checkpoint("runs/a", model=model).step == 40
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    save_checkpoint("runs/a", 60, model=model, optimizer=optimizer)
    assert load_checkpoint("runs/a", model=model, optimizer=optimizer).step == 60
    return found


@alone("Another job saves to the same directory")
def another_job_in_one_directory() -> tuple[str, str]:
    save_checkpoint("runs/a", 40, model=torch.nn.Linear(8, 4))
    with locked(Path("runs/a")):
        found = raised_by(lambda: save_checkpoint("runs/a", 60, model=torch.nn.Linear(8, 4)))
        save_checkpoint("runs/b", 60, model=torch.nn.Linear(8, 4))
    save_checkpoint("runs/a", 60, model=torch.nn.Linear(8, 4))
    return found


@alone("A buffer is used again before its backward")
def buffer_in_use() -> tuple[str, str]:
    fc1, fc2 = symmoe.GroupedLinear(2, 32, 16), symmoe.GroupedLinear(2, 16, 32)
    splits, x = torch.tensor([2, 4]), torch.ones(6, 32, requires_grad=True)

    def step(buffers: list[torch.Tensor]) -> None:
        sum(fc2(fc1(x, splits, out=out), splits).sum() for out in buffers).backward()

    out = torch.empty(6, 16)
    found = raised_by(lambda: step([out, out]), RuntimeError)
    step([out, torch.empty(6, 16)])
    return found


# Python's own search for packages, then an editable install as setuptools makes it: a finder at the end.
EDITABLE = """
import importlib.util, sys
from pathlib import Path

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "symmoe":
            code, where = package / "__init__.py", [str(package)]
            return importlib.util.spec_from_file_location(name, code, submodule_search_locations=where)

here, package = sys.argv[1], Path(sys.argv[2])
sys.path[:] = [here, *(each for each in sys.path if not Path(each, "symmoe").is_dir())]
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in str(each)] + [Finder]
import symmoe

try:
    symmoe.MoEConfig
except AttributeError as error:
    print(type(error).__name__, error, sep="\\n")
"""


@alone("The checkout's folder is found instead of the package")
def folder_of_the_name_of_the_package() -> tuple[str, str]:
    def start_in(folder: str) -> list[str]:
        command = [sys.executable, "-c", EDITABLE, folder, str(Path(symmoe.__file__).parent)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=HANG_S, check=True, env=environment, cwd="/"
        )
        return done.stdout.splitlines()

    Path("home/symmoe/symmoe").mkdir(parents=True)
    Path("elsewhere").mkdir()
    name, text = start_in(str(Path("home").resolve()))
    assert start_in(str(Path("elsewhere").resolve())) == []
    return name, text


# -- machines with GPUs, made up --------------------------------------------------------------------------------------


@contextlib.contextmanager
def a_gpu(*, free_bytes: int = 8 << 30, in_use: bool = False) -> Iterator[pytest.MonkeyPatch]:
    """torch sees a GPU, and nvshmem4py is installed."""
    status = types.SimpleNamespace(STATUS_IS_INITIALIZED=2)
    core = types.SimpleNamespace(InitStatus=status, init_status=lambda: 2 if in_use else 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "mem_get_info", lambda: (free_bytes, 80 << 30))
        patch.setattr(importlib.util, "find_spec", lambda name: object())
        patch.setitem(sys.modules, "nvshmem", types.SimpleNamespace(core=core))
        patch.setitem(sys.modules, "nvshmem.core", core)
        yield patch


def nvshmem_heap() -> symmoe.SymmetricHeap:
    return symmoe.SymmetricHeap(num_bytes=4 << 20, backend="nvshmem")


@alone("nvshmem4py is missing")
def no_nvshmem() -> tuple[str, str]:
    with a_gpu() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        found = raised_by(nvshmem_heap)
    with a_gpu():
        assert nvshmem.preflight(4 << 20) == ""
    return found


@alone("NVSHMEM is in use")
def nvshmem_twice() -> tuple[str, str]:
    with a_gpu(in_use=True):
        found = raised_by(nvshmem_heap)
    with a_gpu():  # after close()
        assert nvshmem.preflight(4 << 20) == ""
    return found


@alone("The heap is larger than the GPU's free memory")
def heap_larger_than_the_gpu() -> tuple[str, str]:
    with a_gpu(free_bytes=1 << 20):
        found = raised_by(nvshmem_heap)
        assert nvshmem.preflight(1 << 19) == ""
    return found


def meet_on_gpus(rank: int, *, uuids: list[str], machines: list[str], reach: bool = True) -> None:
    """What a heap checks of the GPUs of two ranks, on two made-up GPUs."""
    backend = object.__new__(nvshmem.NvshmemBackend)
    backend.device = torch.device("cuda", int(uuids[rank]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid=f"GPU-{uuids[rank]}"))
        patch.setattr(torch.cuda, "can_device_access_peer", lambda here, there: reach)
        patch.setattr(nvshmem.Path, "read_bytes", lambda _: machines[rank].encode())
        backend._check_peers(Bootstrap(None))


@together("Two ranks use one GPU")
def one_gpu_for_two(rank: int, num_ranks: int) -> tuple[str, str]:
    found = raised_by(lambda: meet_on_gpus(rank, uuids=["0", "0"], machines=["a", "a"]))
    meet_on_gpus(rank, uuids=["0", "1"], machines=["a", "a"])
    return found


@together("GPUs cannot address each other")
def gpus_out_of_reach(rank: int, num_ranks: int) -> tuple[str, str]:
    found = raised_by(lambda: meet_on_gpus(rank, uuids=["0", "1"], machines=["a", "a"], reach=False))
    meet_on_gpus(rank, uuids=["0", "1"], machines=["a", "a"])
    return found


@together("Ranks on different machines")
def two_machines(rank: int, num_ranks: int) -> tuple[str, str]:
    found = raised_by(lambda: meet_on_gpus(rank, uuids=["0", "1"], machines=["a", "b"]))
    meet_on_gpus(rank, uuids=["0", "1"], machines=["a", "a"])
    return found


# -- real GPUs --------------------------------------------------------------------------------------------------------


@together("Two ranks use one GPU", on_gpus=True)
def really_one_gpu_for_two(rank: int, num_ranks: int) -> tuple[str, str]:
    torch.cuda.set_device(0)
    found = raised_by(nvshmem_heap)
    torch.cuda.set_device(rank)
    with nvshmem_heap() as heap:
        layer(heap)(torch.ones(4, 32, device=heap.device))
        heap.synchronize()
    return found


@alone("A width that kernels on GPUs do not take", on_gpus=True)
def width_on_a_gpu() -> tuple[str, str]:
    splits = torch.tensor([2, 4], device="cuda")

    def run(width: int) -> None:
        symmoe.GroupedLinear(2, width, 16, device="cuda")(torch.ones(6, width, device="cuda"), splits)

    found = raised_by(lambda: run(36))
    run(40)
    return found


@alone("Exact capacity in a CUDA graph", on_gpus=True)
def exact_capacity_in_a_graph() -> tuple[str, str]:
    with nvshmem_heap() as heap:
        x = torch.ones(4, 32, device=heap.device)

        def capture(model: symmoe.MoELayer) -> torch.cuda.CUDAGraph:
            with torch.no_grad():
                model(x)  # compiles kernels
                heap.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    model(x)
            return graph

        found = raised_by(lambda: capture(layer(heap)))
        capture(layer(heap, capacity=8)).replay()
        heap.synchronize()
    return found


# -- two ranks --------------------------------------------------------------------------------------------------------


@together("Experts inside a DDP that did not know of them")
def experts_in_plain_ddp(rank: int, num_ranks: int) -> tuple[str, str] | None:
    x = torch.ones(4, 32)
    with open_heap() as heap:
        found = raised_by(lambda: DistributedDataParallel(torch.nn.Sequential(layer(heap)))(x))
        model = torch.nn.Sequential(layer(heap))
        symmoe.prepare_for_ddp(model)
        DistributedDataParallel(model)(x)[0].sum().backward()
    return found if rank == 1 else None  # the first of those who notice is named


@together("Experts inside an FSDP that did not know of them")
def experts_in_plain_fsdp(rank: int, num_ranks: int) -> tuple[str, str] | None:
    x = torch.ones(4, 32)
    with open_heap() as heap:
        found = raised_by(lambda: fully_shard(torch.nn.Sequential(layer(heap)))(x))
        mesh = init_device_mesh("cpu", (1, num_ranks), mesh_dim_names=("efsdp", "ep"))
        parallelize(torch.nn.Sequential(layer(heap)), mesh)(x)[0].sum().backward()
    return found if rank == 1 else None


@together("An argument is wrong on one rank")
def wrong_on_one_rank(rank: int, num_ranks: int) -> tuple[str, str] | None:
    with open_heap() as heap:
        topk_idx = torch.tensor([[0, 1]])
        mine = topk_idx.float() if rank == 1 else topk_idx
        name, text = raised_by(lambda: symmoe.make_plan(mine, num_experts=8, heap=heap))
        symmoe.make_plan(topk_idx, num_experts=8, heap=heap)
    assert text.startswith("on rank 1: ") == (rank == 0)
    return (name, text) if rank == 0 else None


@together("The ranks cannot share the experts")
def experts_that_ranks_cannot_share(rank: int, num_ranks: int) -> tuple[str, str]:
    with open_heap() as heap:
        found = raised_by(lambda: layer(heap, num_experts=7))
        layer(heap, num_experts=6)
    return found


@together("Heaps of different sizes")
def heaps_of_different_sizes(rank: int, num_ranks: int) -> tuple[str, str]:
    found = raised_by(lambda: open_heap((4 + rank) << 20))
    open_heap().close()
    return found


@together("Ranks are in different calls")
def ranks_in_different_calls(rank: int, num_ranks: int) -> tuple[str, str]:
    with open_heap() as heap:
        topk_idx, x = torch.tensor([[0, 1]]), torch.ones(1, 32)
        plan = symmoe.make_plan(topk_idx, num_experts=8, heap=heap)
        if rank == 0:
            found = raised_by(lambda: symmoe.make_plan(topk_idx, num_experts=8, heap=heap))
        else:
            found = raised_by(lambda: symmoe.dispatch_tokens(x, plan))
        symmoe.dispatch_tokens(x, plan)
    return found


@together("Ranks disagree in one call")
def widths_that_differ(rank: int, num_ranks: int) -> tuple[str, str]:
    with open_heap() as heap:
        plan = symmoe.make_plan(torch.tensor([[0, 1]]), num_experts=8, heap=heap)
        found = raised_by(lambda: symmoe.dispatch_tokens(torch.ones(1, 32 + 32 * rank), plan))
        symmoe.dispatch_tokens(torch.ones(1, 32), plan)
    return found


@together("Parameters that all ranks should have alike differ")
def checkpoint_of_dense_parameters_that_differ(rank: int, num_ranks: int) -> tuple[str, str]:
    torch.manual_seed(rank)
    model = torch.nn.Linear(8, 4)
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared, src=0)
        found = raised_by(lambda: save_checkpoint(shared[0], 40, model=model))
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        save_checkpoint(shared[0], 40, model=model)
        dist.barrier()
    return found


@together("A rank leaves a save")
def a_rank_that_leaves_a_save(rank: int, num_ranks: int) -> tuple[str, str] | None:
    def interrupt(path: Path, data: bytes) -> None:
        raise KeyboardInterrupt

    model = {"x": ExpertShard(tensor=torch.ones(4), start=4 * rank, num_experts=8)}
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared, src=0)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(files, "write", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    save_checkpoint(shared[0], 40, model=model)
                found = None
            else:
                found = raised_by(lambda: save_checkpoint(shared[0], 40, model=model))
        save_checkpoint(shared[0], 40, model=model)
        dist.barrier()
    return found


@together("A rank does not come")
def a_rank_that_does_not_come(rank: int, num_ranks: int) -> tuple[str, str] | None:
    heap, x = open_heap(), torch.ones(4, 32)
    model = layer(heap)
    heap.timeout_s = heap.start_timeout_s = 0.5
    found = raised_by(lambda: model(x)) if rank == 0 else None
    dist.barrier()
    _close_broken(heap)
    with open_heap() as patient:  # longer than the delay
        model = layer(patient)
        if rank == 1:
            time.sleep(0.7)
        model(x)
    return found


@together("A rank raises")
def a_rank_that_raises(rank: int, num_ranks: int) -> tuple[str, str] | None:
    def train(heap: symmoe.SymmetricHeap) -> None:
        with heap:
            model = layer(heap)
            if rank == 1:
                raise ValueError("bad sample")
            model(torch.ones(4, 32))

    if rank == 0:
        return raised_by(lambda: train(open_heap()))
    with pytest.raises(ValueError, match="bad sample"):
        train(open_heap())
    return None


@together("A rank that others have given up")
def a_rank_that_comes_too_late(rank: int, num_ranks: int) -> tuple[str, str] | None:
    heap, x = open_heap(), torch.ones(4, 32)
    model = layer(heap)
    heap.timeout_s = heap.start_timeout_s = 0.5
    if rank == 0:
        found = None
        raised_by(lambda: model(x))
    dist.barrier()
    if rank == 1:
        found = raised_by(lambda: model(x))
    dist.barrier()
    heap.close()
    with open_heap() as patient:
        layer(patient)(x)
    return found


@together("Shared memory is forbidden")
def no_memfd(rank: int, num_ranks: int) -> tuple[str, str] | None:
    def forbidden(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "memfd_create", forbidden)
        found = raised_by(open_heap)
    open_heap().close()
    return found


@together("Ranks of different users or containers")
def two_users(rank: int, num_ranks: int) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        user = os.geteuid() + rank
        patch.setattr(os, "geteuid", lambda: user)
        found = raised_by(open_heap)
    open_heap().close()
    return found


@together("Ranks want different gradients")
def gradients_of_some_ranks(rank: int, num_ranks: int) -> tuple[str, str]:
    with open_heap() as heap:
        moe = layer(heap)

        def step(num_tokens: int, requires_grad: bool) -> None:
            x = torch.randn(num_tokens, SHAPE["hidden"], requires_grad=requires_grad)
            moe(x)[0].sum().backward()

        found = raised_by(lambda: step(0 if rank else 4, not rank))
        step(0 if rank else 4, True)
    return found


@alone("A hook that never runs")
def hook_on_experts() -> tuple[str, str]:
    with open_heap() as heap:
        moe, x, shapes = layer(heap), torch.randn(4, SHAPE["hidden"]), []

        def see(module: torch.nn.Module, inputs: tuple, outputs: tuple) -> None:
            shapes.append(outputs[0].shape)

        handle = moe.experts.fc1.register_forward_hook(see)
        with pytest.warns(UserWarning, match="never runs") as warned:
            [moe(x) for _ in range(2)]
        assert len(warned) == 1
        assert shapes == []
        handle.remove()
        moe.register_forward_hook(see)
        moe(x)
        assert shapes == [x.shape]
    return "UserWarning", str(warned[0].message)


@together("Every rank trains alone")
def heap_before_the_process_group(rank: int, num_ranks: int) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(num_ranks))
        patch.setattr(dist, "is_initialized", lambda: False)
        with pytest.warns(UserWarning, match="WORLD_SIZE") as warned, open_heap() as heap:
            assert heap.num_ranks == 1
        found = str(warned[0].message)
    with open_heap() as heap:
        assert heap.num_ranks == num_ranks
    return "UserWarning", found


@together("A heap after a timeout")
def a_heap_after_a_timeout(rank: int, num_ranks: int) -> tuple[str, str] | None:
    heap = open_heap()
    model, x, found = layer(heap), torch.ones(4, 32), None
    heap.timeout_s = heap.start_timeout_s = 0.5
    if rank == 0:
        raised_by(lambda: model(x))
        found = raised_by(lambda: model(x))
    dist.barrier()
    _close_broken(heap)
    with open_heap() as again:
        layer(again)(x)
    return found


def _close_broken(heap: symmoe.SymmetricHeap) -> None:
    try:
        heap.close()
    except errors.PeerAborted:
        assert heap.rank == 1  # is told that it has been given up


# -- ranks that do not live through it --------------------------------------------------------------------------------


def end_during_construction(rank: int, num_ranks: int, path: str) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _write_down_and_end(path, start_timeout_s=PROMPT_S)


def never_construct(rank: int, num_ranks: int, path: str) -> None:
    if rank == 1:
        while not Path(path).is_file():
            time.sleep(0.05)
        os._exit(7)
    _write_down_and_end(path, start_timeout_s=1.0)


def _write_down_and_end(path: str, **options: float) -> None:
    name, text = raised_by(lambda: open_heap(**options))
    Path(path + ".partial").write_text(f"{name}\n{text}")
    os.rename(path + ".partial", path)
    os._exit(7)  # the process group is broken


def construct(rank: int, num_ranks: int) -> None:
    with open_heap() as heap:
        layer(heap)(torch.ones(4, 32))


BROKEN = {"A rank ends while the heap is made": end_during_construction, "A rank never makes its heap": never_construct}


# -- the page ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One heading of the page: the class of the section that it is in, and what stands under it."""

    section: str
    heading: str
    body: str

    @property
    def text(self) -> str:
        (text,) = re.findall(r"^```text\n(.*?)\n```$", self.body, re.DOTALL | re.MULTILINE)
        return " ".join(text.split())

    def says(self, found: tuple[str, str]) -> bool:
        """Whether it is what was raised."""
        pattern = ".*".join(re.escape(part) for part in self.text.split(ANY))
        return found[0] == self.section and re.fullmatch(pattern, found[1], re.DOTALL) is not None


def sections() -> dict[str, list[Entry]]:
    """The entries of the page, by class."""
    found = {}
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        name, *rest = re.split(r"^### ", section, flags=re.MULTILINE)
        name = name.split("\n", 1)[0].strip()
        found[name] = [Entry(name, heading, body) for heading, body in (each.split("\n", 1) for each in rest)]
    return found


def entries() -> dict[str, Entry]:
    """The entries of the page, by heading."""
    every = [entry for section in sections().values() for entry in section]
    assert len({entry.heading for entry in every}) == len(every)
    return {entry.heading: entry for entry in every}


def assert_on_page(heading: str, found: tuple[str, str]) -> None:
    assert [entry.heading for entry in entries().values() if entry.says(found)] == [heading], found


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=case.marks, id=case.provoke.__name__) for case in CASES if case.num_ranks == 1]
)
def test_on_one_rank(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    assert_on_page(case.heading, case.provoke())


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=case.marks, id=case.provoke.__name__) for case in CASES if case.num_ranks == 2]
)
def test_on_two_ranks(case: Case, cluster: Callable[..., Cluster]):
    raised = [found for found in cluster(2, "cuda" if case.on_gpus else "cpu").run(case.provoke) if found]
    assert raised
    for found in raised:
        assert_on_page(case.heading, found)


@pytest.mark.parametrize("heading", BROKEN)
def test_ranks_that_do_not_live_through_it(heading: str, tmp_path: Path):
    ranks, path = Cluster(2), tmp_path / "found"
    try:
        with pytest.raises(RankFailure, match="died with exit code"):
            ranks.run(BROKEN[heading], str(path))
    finally:
        ranks.close()
    name, text = path.read_text().split("\n", 1)
    assert_on_page(heading, (name, text))
    again = Cluster(2)  # the job, started again
    try:
        again.run(construct)
    finally:
        again.close()


def problems_of_the_page(cases: Collection[str]) -> list[str]:
    """Headings without a case, cases without a heading, sections and entries that are not whole."""
    here = entries()
    problems = [f"no case: {heading}" for heading in here.keys() - cases]
    problems += [f"no heading: {heading}" for heading in cases - here.keys()]
    problems += [f"no entry: {section}" for section, found in sections().items() if not found]
    for entry in here.values():
        for part in ("```text", "*Cause:*", "*Fix:*"):
            if entry.body.count(part) != 1:
                problems.append(f"{entry.heading}: {entry.body.count(part)} times {part}")
    return problems


def test_every_heading_has_a_case_and_every_case_a_heading():
    cases = {case.heading for case in CASES} | BROKEN.keys()
    assert not problems_of_the_page(cases)
    assert problems_of_the_page(cases - {"Two ranks use one GPU"}) == ["no case: Two ranks use one GPU"]
    assert problems_of_the_page(cases | {"Nothing"}) == ["no heading: Nothing"]
    on_cpus = [case for case in CASES if not case.on_gpus]
    assert len({case.heading for case in on_cpus}) == len(on_cpus)


def test_every_class_is_on_the_page():
    classes = {c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.SymmoeError)}
    bases = {base for c in classes for base in c.__bases__} - {errors.ArgumentError}  # which is raised itself
    assert sections().keys() - OTHERS == {c.__name__ for c in classes - bases}


def test_another_text_is_not_on_the_page():
    """Negative control: the comparison can fail."""
    entry = next(entry for entry in entries().values() if ANY not in entry.text)
    assert entry.says((entry.section, entry.text))
    assert not entry.says((entry.section, entry.text + "."))
    assert not entry.says(("SymmoeError", entry.text))
    open_text = next(entry for entry in entries().values() if ANY in entry.text)
    assert open_text.says((open_text.section, open_text.text.replace(ANY, "7")))
    assert not open_text.says((open_text.section, open_text.text.replace(ANY, "7")[1:]))
