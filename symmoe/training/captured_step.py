"""A whole training step as a CUDA graph that stays exact: a replay with too small a row budget is repeated eagerly."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from symmoe.checks.arguments import check_factor, check_kind, size_problem
from symmoe.errors import ArgumentError, HeapSuspended, SymmoeError, first_problem, raise_for
from symmoe.kernels import control
from symmoe.moe.ddp_and_fsdp import gradients_elsewhere
from symmoe.moe.layer import MoELayer
from symmoe.symm_mem.heap import FailPeersOnError, SymmetricHeap, fixed_rows
from symmoe.torch_internals import (
    ddp_parameters,
    may_redirect_streams,
    redirected_streams,
    stop_ddp_timing,
)
from symmoe.training.step_kind import Modules, Tree, modes

R = TypeVar("R")


def capture_step(
    step: Callable[..., R], model: nn.Module, *, row_budget_factor: float = 1.25, num_eager: int = 3
) -> CapturedStep[R]:
    """Replays a training step as a CUDA graph, with exact capacity: no token is dropped.

    `step` runs forward and backward of one optimizer step, with all its micro-batches, and returns e.g. the loss; the
    optimizer's step follows the call (docs/tuning.md). Each call replaces `.grad` with its own gradients: zero_grad is
    not needed. The result is detached.
    The first calls are eager, and so is the first one with inputs of other shapes or dtypes. Then the step is captured
    with row budgets of `row_budget_factor` times the rows that layers with capacity None have needed. If a layer of any
    rank needs more rows in a replay, that layer moves none. The host detects this before the call returns, and runs the
    step again, eagerly and exactly, from the same inputs, buffers and random numbers; the next call captures it with a
    larger budget.
    CPUs have no graphs: every call is eager. On a heap that spans nodes, messages to other nodes have such budgets,
    and :meth:`CapturedStep.close` must precede the heap's.

    Collective over the EP group of the model's layers: all its ranks must make the changes listed below in the same
    calls. Each call synchronises the host once, at its end.

    With DDP or FSDP2 (pass the wrapper as `model`) the graph reduces gradients, and all participating ranks repeat a
    step together, as all replicas do with aux_loss="global"; so the call is collective over them. DDP needs 11 passes
    with its reduction before a capture; with torch before 2.13 it must be built in a context
    `torch.cuda.stream(torch.cuda.Stream())`. A graph waits in NCCL without a timeout, e.g. for a lost rank.

    A new graph is captured for other shapes, dtypes and strides of tensors among the arguments; other constants (a
    factor, a flag; on GPUs also a CPU tensor without dimensions); another mode of the model (train or eval), other
    hooks, loggers, parameters that require gradients, and public attributes of modules (the p of a Dropout); autocast,
    grad mode, deterministic algorithms, and precision of matrix products. If only memory addresses change
    (`parameter.data = ..`), the next call captures the step once more.

    Args:
        step: takes and returns tensors, constants, and tuples, lists, dicts and dataclasses of them. It must not read
            values of device tensors, and must do the same in every call: the capture fixes all other values that it
            reads from its closure or from modules.
        model: all modules that the step uses, and so all parameters and buffers that it uses or changes; for several
            models an nn.ModuleList.
        row_budget_factor, num_eager: at least 1; num_eager is the number of eager calls before a capture.

    Raises:
        ArgumentError: a number is out of range; layers are on several heaps; experts accumulate into main_grad or delay
            weight gradients (which cannot be undone); or a DDP finds unused parameters, is not in `model`, or was
            built on a stream that a capture cannot use.
    """
    check_kind("step", step, Callable, "a function")
    check_factor("row_budget_factor", row_budget_factor, at_least=1)
    raise_for(size_problem(num_eager=num_eager))
    captured = CapturedStep(step, model, row_budget_factor, num_eager)
    raise_for(_problem(captured.modules))
    return captured


def _problem(modules: Modules) -> ArgumentError | None:
    """The reason why steps of these modules cannot be captured, or None."""
    elsewhere = (
        gradients_elsewhere(layer.experts, "a step that is repeated would count twice")
        for layer in modules.layers
    )
    around = {layer._ddp_ref() for layer in modules.layers} - {None}
    return next(filter(None, elsewhere), None) or first_problem(
        (
            len({layer.heap for layer in modules.layers}) > 1,
            "model has layers on several heaps, whose groups could not agree to repeat a step",
        ),
        (
            around - set(modules.ddps),
            "model must be the DistributedDataParallel that the step calls, not what it wraps",
        ),
        (
            any(ddp.find_unused_parameters and not ddp.static_graph for ddp in modules.ddps),
            "find_unused_parameters (True) of DistributedDataParallel must be False: hosts would wait",
        ),
        (
            modules.ddp_on_default_stream,
            "DistributedDataParallel was built on CUDA's default stream, which no capture may use: build it in `with "
            f"torch.cuda.stream(torch.cuda.Stream()):`, or take torch 2.13 or newer (this is {torch.__version__})",
        ),
    )


class CudaGraph:
    """A CUDA graph of `function`, which runs on the heaps; construction captures without a run."""

    def __init__(self, function: Callable[[], None], heaps: list[SymmetricHeap]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with ExitStack() as arenas:
            with torch.cuda.graph(self._graph):
                for heap in heaps:
                    arenas.callback(heap.memory.release_graphs, heap.streams.capture)
                function()
            self._arenas = arenas.pop_all()

    def replay(self) -> None:
        """Launches the graph on its captured memory. Does not wait for the end."""
        self._graph.replay()

    def end(self) -> None:
        """Frees the graph's memory."""
        self._graph.reset()
        self._arenas.close()


class _Replay:
    """A captured step, and the memory that its replays read and write. `addresses`: those of the modules' tensors."""

    def __init__(self, owner: CapturedStep[Any], arguments: Tree) -> None:
        self._inputs = [tensor.clone() for tensor in arguments.tensors]
        static = Tree(arguments.with_tensors(self._inputs))
        self._states = owner.modules.states()
        self._parameters = owner.modules.parameters
        self._saved = [torch.empty_like(state) for state in self._states]
        self.outcome = torch.ones(
            2, dtype=torch.int32, device=owner.device
        )  # fits its budget, no other error
        groups = _deciding_groups(owner.modules)
        self._result: Tree | None = None

        def function() -> None:
            for state, saved in zip(self._states, self._saved, strict=True):
                saved.copy_(state)
            torch.clear_autocast_cache()  # the graph casts weights itself, in every replay
            reports: list[torch.Tensor] = []
            with ExitStack() as stack:  # no wait for plans
                for heap in owner.heaps:
                    stack.enter_context(fixed_rows(heap, owner.row_budget_factor, reports))
                self._result = owner.run(static)
            torch.clear_autocast_cache()
            errors = [report[control.SUM_ERROR : control.SUM_ERROR + 1] for report in reports]
            if errors:
                fits = torch.cat(errors) != control.PLAN_OVER_BUDGET
                is_right = torch.cat(errors) == control.PLAN_OK
                self.outcome.copy_(torch.stack([fits.all(), (is_right | ~fits).all()]))
            agree()

        def agree() -> None:
            for group in groups:
                dist.all_reduce(self.outcome, dist.ReduceOp.MIN, group=group)

        agree()  # before the capture, so that all connections exist
        owner.clear_gradients()
        assert owner.make_graph is not None
        with redirected_streams() if owner.modules.ddps else nullcontext():
            self._graph = owner.make_graph(function, owner.heaps)
        self._gradients = [parameter.grad for parameter in self._parameters]
        owner.modules.settings()
        self.addresses = owner.modules.addresses

    def run(self, inputs: list[torch.Tensor]) -> Any:
        """Replays the step on new inputs, and returns the result."""
        for static_input, value in zip(self._inputs, inputs, strict=True):
            static_input.copy_(value)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        assert self._result is not None
        # Copies: the next replay writes where the graph's tensors are.
        return self._result.with_tensors([tensor.clone() for tensor in self._result.tensors])[
            "result"
        ]

    def restore(self) -> None:
        """Restores the buffers' values from before the last replay."""
        for state, saved in zip(self._states, self._saved, strict=True):
            state.copy_(saved)

    def end(self) -> None:
        """Frees the graph's memory."""
        self._gradients.clear()
        self._result = None
        self._graph.end()


class CapturedStep(Generic[R]):
    """The result of :func:`capture_step`; call it in place of the step.

    Attributes:
        num_replays, num_repeated, num_captures: calls replayed successfully; replays with too small a budget;
            captures.
    """

    def __init__(
        self, step: Callable[..., R], model: nn.Module, row_budget_factor: float, num_eager: int
    ) -> None:
        self.step = step
        self.row_budget_factor = row_budget_factor
        self._num_eager = num_eager
        self.modules = Modules(model)
        self.heaps = list(dict.fromkeys(layer.heap for layer in self.modules.layers))
        self._signature = inspect.signature(step)
        self.make_graph: Callable[[Callable[[], None], list[SymmetricHeap]], CudaGraph] | None = (
            CudaGraph if self.device.type == "cuda" else None
        )
        self._replays: dict[Hashable, _Replay] = {}
        self._num_calls: dict[Hashable, int] = {}
        self._num_inspections = self.modules.num_inspections
        self.num_replays = self.num_repeated = self.num_captures = 0

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """The step with these arguments. Collective; synchronises the host.

        Raises:
            ArgumentError: an argument, or a part of the result, cannot be captured, e.g. it requires a gradient:
                a replay computes gradients of parameters only. Or the step writes into arguments or parameters, or
                replaces parts of the model in every call.
            SymmoeError: errors of the step's layers, in a replay at its end. The next calls are eager.
        """
        try:
            return self._call(args, kwargs)
        except SymmoeError as error:
            if not isinstance(error, HeapSuspended):
                self._num_calls.clear()  # heaps have lost the row counts of calls
            raise

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        with ExitStack() as stack:
            for heap in self.heaps:
                stack.enter_context(FailPeersOnError(heap, control.PHASE_PLAN))
            arguments = Tree(self._signature.bind(*args, **kwargs).arguments, self.device)
            kind = self._kind(arguments)
            is_early = self._num_calls.get(kind, 0) < self._num_eager
            if not is_early and kind not in self._replays:
                raise_for(_problem(self.modules))
        if (
            self.make_graph is None
            or is_early
            or (kind not in self._replays and not all(map(stop_ddp_timing, self.modules.ddps)))
        ):
            return self._run_eagerly(arguments)
        for heap in self.heaps:
            heap.check()  # a rank may be lost: a replay would use closed connections
        if kind in self._replays and self._replays[kind].addresses != self.modules.addresses:
            self._discard(kind)
        if kind not in self._replays:
            self._replays[kind] = _Replay(self, arguments)
            self.num_captures += 1
        replay = self._replays[kind]
        random_state = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        result: R = replay.run(arguments.tensors)
        fits_budget, is_right = replay.outcome.tolist()  # waits for the replay
        for heap in self.heaps:
            heap.check()
        if not is_right:
            raise SymmoeError("the step has failed in another EP group, whose error says why")
        if fits_budget:
            self.num_replays += 1
            return result
        self.num_repeated += 1
        replay.restore()
        if random_state is not None:
            torch.cuda.set_rng_state(random_state, self.device)
        del result
        self._discard(kind)
        return self._run_eagerly(arguments)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(
            (t.device for t in (*self.modules.located, *self.modules.sharded)), torch.device("cpu")
        )

    def close(self) -> None:
        """Ends all graphs and frees their memory. The next call captures again."""
        for kind in list(self._replays):
            self._discard(kind)

    def _discard(self, kind: Hashable) -> None:
        self.clear_gradients()
        self._replays.pop(kind).end()

    def _kind(self, arguments: Tree) -> Hashable:
        """The key of a captured step: all that decides its kernels, except tensor addresses."""
        kind = arguments.kind, modes(self.device.type), self.modules.settings()
        if self.modules.num_inspections != self._num_inspections:  # no earlier kind can recur
            self._num_inspections = self.modules.num_inspections
            while self._replays:
                self._replays.popitem()[1].end()
        return kind

    def clear_gradients(self) -> None:
        """Sets all gradients to None."""
        for parameter in self.modules.parameters:
            parameter.grad = None

    def run(self, arguments: Tree) -> Tree:
        """Runs the step on these arguments. Detaches its result: the autograd graph would keep nodes of this call's
        stream, which would break a capture."""
        self.clear_gradients()
        bound = inspect.BoundArguments(self._signature, arguments.with_tensors(arguments.tensors))
        with self.modules.running(dict(zip(arguments.paths, arguments.tensors, strict=True))):
            result = Tree({"result": self.step(*bound.args, **bound.kwargs)})
        return Tree(dict(result.with_tensors([tensor.detach() for tensor in result.tensors])))

    def _run_eagerly(self, arguments: Tree) -> R:
        with _recorded_streams(self.modules):
            result = self.run(arguments)
        kind = self._kind(arguments)  # the run has shown what the step itself sets
        self._num_calls[kind] = self._num_calls.get(kind, 0) + 1
        return cast(R, result.with_tensors(result.tensors)["result"])


@contextmanager
def _recorded_streams(modules: Modules) -> Iterator[None]:
    """A context in which backward records whether a DDP accumulates gradients on the default stream: DDP keeps autograd
    nodes, and nodes keep their stream. Does nothing where torch can redirect them."""

    def record_stream(_: object) -> None:
        modules.ddp_on_default_stream |= torch.cuda.current_stream() == torch.cuda.default_stream()

    modules.ddp_on_default_stream = False
    ddps = modules.ddps if torch.cuda.is_available() and not may_redirect_streams else ()
    with ExitStack() as stack:
        for parameter in (
            param for ddp in ddps for param in ddp_parameters(ddp) if param.requires_grad
        ):
            stack.callback(
                torch.autograd.graph.get_gradient_edge(parameter)
                .node.register_prehook(record_stream)
                .remove
            )
        yield


def _deciding_groups(modules: Modules) -> list[dist.ProcessGroup]:
    """Groups over which a step reduces gradients or loads, so that their ranks must repeat it together; the same order
    on all ranks. Omits groups within an EP group (its ranks see the same plans) or within another listed group."""
    groups = [ddp.process_group for ddp in modules.ddps]
    groups += [
        layer.heap.expert_group
        for layer in modules.layers
        if isinstance(layer, MoELayer)
        and layer.sums_global_load
        and layer.heap.expert_group is not None
    ]
    for mesh in dict.fromkeys(parameter.device_mesh for parameter in modules.sharded):
        groups += mesh.get_all_groups()
    covered = [set(layer.heap.bootstrap.global_ranks) for layer in modules.layers]
    deciding = []
    for group in sorted(groups, key=dist.get_world_size, reverse=True):
        ranks = set(dist.get_process_group_ranks(group))
        if not any(ranks <= superset for superset in covered):
            deciding.append(group)
            covered.append(ranks)
    return deciding
