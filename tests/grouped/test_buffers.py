"""Buffers of the caller: refused buffers, and reuse of a buffer, which is correct or an error, never silently wrong."""

import functools
import gc
import itertools
from collections.abc import Callable
from contextlib import nullcontext

import grouped_cases as cases
import pytest
import torch
from torch import nn

import symmoe
from symmoe.checks.arguments import Buffer, overlap_problem
from symmoe.kernels import twin

PLAIN = cases.Case(buffers=())
N, H = cases.TINY.num_rows, cases.TINY.hidden
BOTH = ("out", "grad_input_out")


class Op:
    """A module H -> H of one of WAYS, with its own parameters; called as op(x, out=..., grad_input_out=...)."""

    def __init__(self, name: str, case: cases.Case = PLAIN) -> None:
        self.name = name
        self.inputs = cases.make_inputs(case, width=H if name == "linear" else None)
        self.scale, self.splits = self.inputs.scale, self.inputs.splits
        activation, kind = symmoe.grouped.ScaledSwiGLU(), name
        if name == "modules":  # of one Sequential
            activation.register_forward_hook(lambda *_: None)
            kind = "sequential"
        self.call, layers = cases.make_way(kind, case, self.inputs, activation=activation)
        self.fc1, *_, self.fc2 = [*layers.values()] * 2

    def __call__(self, x, **buffers):
        return self.call(x, self.scale, self.splits, **buffers)

    def gradient(self) -> torch.Tensor:
        """The gradient of x without buffers, for these inputs and their d_y."""
        x = self.inputs.x.clone().requires_grad_()
        return torch.autograd.grad(self(x), x, self.inputs.d_y)[0][: cases.TINY.num_used]


@pytest.fixture(params=cases.WAYS)
def op(request) -> Op:
    return Op(request.param)


@pytest.fixture(params=[name for name in cases.WAYS if name != "modules"])
def single(request) -> Op:
    """An op whose backward is one step that reads the result's gradient while it writes the gradient of x."""
    return Op(request.param)


@pytest.fixture
def raw_writes(monkeypatch) -> None:
    """Twins whose writes bypass autograd's version counters, like kernels on GPUs."""

    def write(kernel, rows, weight, row_range, out, **options):
        kernel(rows, weight, row_range, out.data, **options)

    for name in ("grouped_gemm", "grouped_gemm_dgrad"):
        monkeypatch.setattr(twin, name, functools.partial(write, getattr(twin, name)))


def buffer(*shape: int) -> torch.Tensor:
    return torch.full(shape or (N, H), cases.SENTINEL)


def right_or_error(compute: Callable[[], None], check: Callable[[], None]) -> None:
    """The rule for every reuse: the results are correct, or there is an error."""
    try:
        compute()
    except (symmoe.errors.ArgumentError, symmoe.errors.StaleLease):
        return
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        return
    check()


# -- what is refused --------------------------------------------------------------------------------------------------
MISTAKES = {  # the buffer from the op and its x, parts of the text
    "list": (lambda op, x: [1.0], ["(list)", "tensor"]),
    "sparse": (lambda op, x: buffer().to_sparse(), ["(torch.sparse_coo) must be a strided tensor"]),
    "a row more": (
        lambda op, x: buffer(N + 1, H),
        [f"shape [{N + 1}, {H}]", f"must be [{N}, {H}]"],
    ),
    "without the tail": (lambda op, x: buffer(9, H), [f"shape [9, {H}]", f"must be [{N}, {H}]"]),
    "a column more": (
        lambda op, x: buffer(N, H + 1),
        [f"shape [{N}, {H + 1}]", f"must be [{N}, {H}]"],
    ),
    "flat": (lambda op, x: buffer(N * H), [f"shape [{N * H}]", f"must be [{N}, {H}]"]),
    "N-D for 2D": (lambda op, x: buffer(3, 4, H), [f"shape [3, 4, {H}]", f"must be [{N}, {H}]"]),
    "dtype": (lambda op, x: buffer().bfloat16(), ["dtype torch.bfloat16", "must be torch.float32"]),
    "double": (lambda op, x: buffer().double(), ["dtype torch.float64", "must be torch.float32"]),
    "device": (lambda op, x: buffer().to("meta"), ["is on meta", "must be on cpu"]),
    "strided": (lambda op, x: buffer(N, 2 * H)[:, ::2], [f"strides [{2 * H}, 2]", "contiguous"]),
    "transposed": (lambda op, x: buffer(H, N).t(), [f"strides [1, {N}]", "contiguous"]),
    "expanded": (lambda op, x: buffer(1, H).expand(N, H), [f"strides [0, {1}]", "contiguous"]),
    "gradient": (lambda op, x: buffer().requires_grad_(), ["requires a gradient"]),
    "history": (lambda op, x: buffer().requires_grad_() * 1, ["requires a gradient"]),
    "address": (
        lambda op, x: buffer(N * H + 1)[1:].view(N, H),
        ["starts at address", "aligned to 16"],
    ),
    "input": (lambda op, x: x.detach(), ["overlaps"]),
    "end of the input": (lambda op, x: around(x, N - 1), ["overlaps"]),
    "start of the input": (lambda op, x: around(x, 1 - N), ["overlaps"]),
    "weight": (lambda op, x: inside(op.fc1, "weight"), ["overlaps"]),
    "bias": (lambda op, x: inside(op.fc1, "bias"), ["overlaps"]),
    "weight of the second layer": (lambda op, x: inside(op.fc2, "weight"), ["overlaps"]),
    "splits": (lambda op, x: with_splits(op), ["overlaps a tensor of shape [4]"]),
    "scale": (lambda op, x: with_scale(op), ["overlaps a tensor of shape"]),
}


def around(x: torch.Tensor, first_row: int) -> torch.Tensor:
    """[N, H] in memory that x lies in the middle of; starts so many rows after x."""
    return x._base.view(-1).as_strided((N, H), (H, 1), x.storage_offset() + first_row * H)


def with_splits(op: Op) -> torch.Tensor:
    """[N, H] that ends with the splits."""
    memory = buffer(2 * N, H)
    op.splits = memory.view(torch.int32).view(-1)[N * H - 4 : N * H].copy_(op.splits)
    return memory[:N]


def with_scale(op: Op) -> torch.Tensor:
    """[N, H] whose second half begins with the scale; with the bias of a layer that has none."""
    if op.name == "linear":
        return inside(op.fc1, "bias")
    memory = buffer(2 * N, H)
    op.scale = memory.view(-1)[N * H // 2 : N * H // 2 + N].fill_(1.0)
    return memory[:N]


def inside(layer: torch.nn.Module, name: str) -> torch.Tensor:
    """[N, H] that shares memory with a parameter of the layer."""
    parameter = getattr(layer, name)
    memory = torch.zeros(max(N * H, parameter.numel()))
    setattr(
        layer,
        name,
        torch.nn.Parameter(
            memory[: parameter.numel()].view(parameter.shape).copy_(parameter.detach())
        ),
    )
    return memory[: N * H].view(N, H)


def x_with_room(op: Op) -> torch.Tensor:
    """x as rows N to 2N of a larger tensor."""
    memory = torch.zeros(3 * N, H)
    memory[N : 2 * N] = op.inputs.x.nan_to_num()
    return memory[N : 2 * N]


@pytest.mark.parametrize(("make", "parts"), MISTAKES.values(), ids=MISTAKES)
def test_wrong_buffers_are_refused_in_forward(op, make, parts):
    x = x_with_room(op)
    wrong = make(op, x)
    second_buffer = buffer()
    want = op(x)
    saved = x.clone()
    contexts = nullcontext, torch.no_grad, torch.inference_mode
    for (name, right), context in itertools.product((BOTH, BOTH[::-1]), contexts):
        with context(), pytest.raises(symmoe.errors.ArgumentError) as caught:
            op(x, **{right: second_buffer, name: wrong})
        text = str(caught.value)
        assert text.startswith(name)
        for part in parts:
            assert part in text
    assert (second_buffer == cases.SENTINEL).all(), "nothing has been computed"
    cases.assert_same_bits(x, saved)
    out = buffer()
    y = op(x, out=out, grad_input_out=buffer())
    cases.assert_same_bits(y[: cases.TINY.num_used], want[: cases.TINY.num_used])
    assert y.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("shift", [0, 1, 1 - N])
def test_overlapping_buffers_are_refused(op, shift):
    memory = buffer(3 * N, H)
    with pytest.raises(symmoe.errors.ArgumentError, match="overlaps a tensor of shape"):
        op(op.inputs.x, out=memory[N : 2 * N], grad_input_out=memory[N + shift : 2 * N + shift])


def test_an_empty_tensor_overlaps_nothing():
    """An empty tensor has an address, too."""
    memory = torch.zeros(8, 4)
    assert overlap_problem([Buffer("out", memory)], [memory[4:4]]) is None
    assert overlap_problem([Buffer("out", memory[:4])], [memory[4:]]) is None
    assert "overlaps a tensor of shape [5, 4]" in str(
        overlap_problem([Buffer("out", memory[:4])], [memory[3:]])
    )


def released(heap: symmoe.SymmetricHeap, like: torch.Tensor) -> torch.Tensor:
    """A view of a released lease's memory, which another lease has taken."""
    lease = heap.lease(tuple(like.shape), like.dtype, name="mine")
    view = lease.tensor.copy_(like)[:]
    lease.release()
    return view


INPUTS = cases.make_inputs(PLAIN)
SPLITS = INPUTS.splits
LINEAR = cases.make_linear(PLAIN, INPUTS.w1, INPUTS.b1)
SWIGLU = symmoe.grouped.ScaledSwiGLU()
MLP = symmoe.GroupedMLP(cases.TINY.num_groups, H, cases.TINY.ffn)
MODULES = symmoe.grouped.Sequential(
    LINEAR, nn.Identity(), SWIGLU, cases.make_linear(PLAIN, INPUTS.w2, INPUTS.b2)
)
# (argument, a call of a public function that is given a released tensor for it).
CALLS_WITH_RELEASED_MEMORY = [
    ("x", lambda free: LINEAR(free(INPUTS.x), SPLITS)),
    ("splits", lambda free: LINEAR(INPUTS.x, free(SPLITS))),
    ("bias_scale", lambda free: LINEAR(INPUTS.x, SPLITS, bias_scale=free(INPUTS.scale))),
    *(
        (name, lambda free, call=call, name=name: call(**{name: free(INPUTS.x)}))
        for name in BOTH
        for call in (
            functools.partial(LINEAR, INPUTS.x, SPLITS),
            functools.partial(MLP, INPUTS.x, SPLITS, INPUTS.scale),
        )
    ),
    ("rows", lambda free: MLP(free(INPUTS.x), SPLITS, INPUTS.scale)),
    ("splits", lambda free: MLP(INPUTS.x, free(SPLITS), INPUTS.scale)),
    ("row_probs", lambda free: MLP(INPUTS.x, SPLITS, free(INPUTS.scale))),
    ("h", lambda free: SWIGLU(free(INPUTS.x), INPUTS.scale)),
    ("scale", lambda free: SWIGLU(INPUTS.x, free(INPUTS.scale))),
    ("x", lambda free: MODULES(free(INPUTS.x), SPLITS, INPUTS.scale, SPLITS)),
    ("splits", lambda free: MODULES(INPUTS.x, SPLITS, INPUTS.scale, free(SPLITS))),
    ("scale", lambda free: MODULES(INPUTS.x, SPLITS, free(INPUTS.scale), SPLITS)),
]


@pytest.mark.parametrize(("name", "call"), CALLS_WITH_RELEASED_MEMORY)
def test_tensors_of_a_released_lease_are_refused(heap, name, call):
    with pytest.raises(
        symmoe.errors.StaleLease, match=rf"^{name} is memory of lease 'mine' \(generation 1\)"
    ):
        call(lambda like: released(heap, like))
    call(lambda like: heap.lease(tuple(like.shape), like.dtype).tensor.copy_(like))


def test_a_gradient_of_a_released_lease_is_refused(op, heap):
    x = op.inputs.x.clone().requires_grad_()
    y = op(x)
    with pytest.raises(symmoe.errors.StaleLease, match=r"^d_y is memory of lease 'mine'"):
        y.backward(released(heap, op.inputs.d_y))
    assert x.grad is None
    y.backward(op.inputs.d_y)
    cases.assert_same_bits(used_rows_of(x.grad), op.gradient())


def test_a_gradient_buffer_may_be_the_memory_of_the_incoming_gradient(single):
    grad_input_out = buffer()
    x = single.inputs.x.clone().requires_grad_()
    y = single(x, grad_input_out=grad_input_out)
    with pytest.raises(symmoe.errors.ArgumentError, match=r"grad_input_out.*overlaps"):
        y.backward(grad_input_out)
    y = single(x, grad_input_out=grad_input_out)
    y.backward(single.inputs.d_y)
    cases.assert_same_bits(used_rows_of(x.grad), single.gradient())


# -- using a buffer again ---------------------------------------------------------------------------------------------
used_rows_of = functools.partial(cases.used, sizes=cases.TINY)


def batches(count: int = 3) -> list[cases.Inputs]:
    return [cases.make_inputs(PLAIN, seed=10 + i) for i in range(count)]


Memory = torch.Tensor | None  # a buffer that is used again and again, or none


def one_leaf(op: Op, out: Memory, gradient: Memory) -> list[torch.Tensor]:
    """Autograd must not use the buffer itself as the leaf's `.grad`."""
    x = op.inputs.x.clone().requires_grad_()
    for batch in batches():
        with torch.no_grad():
            x.copy_(batch.x)
        op(x, out=out, grad_input_out=gradient).backward(batch.d_y)
        assert gradient is None or x.grad.data_ptr() != gradient.data_ptr()
    return [x.grad]


def separate_gradients(
    op: Op, out: Memory, gradient: Memory, is_leaf: bool = True
) -> list[torch.Tensor]:
    """A later micro-batch does not overwrite the `.grad` of an earlier one, of a leaf or retained."""
    xs = []
    for batch in batches():
        x = batch.x.clone().requires_grad_()
        xs.append(x if is_leaf else x * 1)
        xs[-1].retain_grad()
        op(xs[-1], grad_input_out=gradient).backward(batch.d_y)
    return [x.grad for x in xs]


def backward_twice(op: Op, out: Memory, gradient: Memory) -> list[torch.Tensor]:
    x = op.inputs.x.clone().requires_grad_()
    y = op(x, out=out, grad_input_out=gradient)
    y.backward(op.inputs.d_y, retain_graph=True)
    y.backward(op.inputs.d_y)
    return [x.grad]


def a_second_consumer(
    op: Op, out: Memory, gradient: Memory, is_leaf: bool = True
) -> list[torch.Tensor]:
    source = op.inputs.x.nan_to_num().requires_grad_()
    x = source if is_leaf else source * 1
    ys = [op(x, out=out, grad_input_out=gradient), x * 3]
    torch.autograd.backward(ys, [op.inputs.d_y.nan_to_num(), torch.ones(N, H)])
    return [source.grad]


def out_after_backward(op: Op, out: Memory, gradient: Memory) -> list[torch.Tensor]:
    xs = []
    for batch in batches():
        xs.append(batch.x.nan_to_num().requires_grad_())
        (op(xs[-1], out=out, grad_input_out=gradient) ** 2)[: cases.TINY.num_used].sum().backward()
    return [x.grad for x in xs]


def two_consumers(
    op: Op, out: Memory, gradient: Memory, is_leaf: bool = True
) -> list[torch.Tensor]:
    """The second gradient must not overwrite the first before autograd has added them."""
    source = op.inputs.x.nan_to_num().requires_grad_()
    x = source if is_leaf else source * 1
    torch.autograd.backward(
        [op(x, grad_input_out=gradient) for _ in range(2)],
        [op.inputs.d_y.nan_to_num(), 2 * op.inputs.d_y.nan_to_num()],
    )
    return [source.grad]


def two_micro_batches(op: Op, out: Memory, gradient: Memory) -> list[torch.Tensor]:
    """In one backward: the producers of both x run after both gradients are written."""
    leaves = [batch.x.nan_to_num().requires_grad_() for batch in batches(2)]
    ys = [op(leaf * (2 + i), grad_input_out=gradient) for i, leaf in enumerate(leaves)]
    torch.autograd.backward(ys, [batch.d_y.nan_to_num() for batch in batches(2)])
    return [leaf.grad for leaf in leaves]


def layers_in_a_row(op: Op, out: Memory, gradient: Memory) -> list[torch.Tensor]:
    """The outer gradient is read while the inner one is written."""
    x = op.inputs.x.nan_to_num().requires_grad_()
    y = op(op(x, grad_input_out=gradient), grad_input_out=gradient)
    return [torch.autograd.grad(y, x, op.inputs.d_y.nan_to_num())[0]]


def result_written_in_place(op: Op, out: Memory, gradient: Memory) -> list[torch.Tensor]:
    """y.mul_(2) writes into the caller's buffer: gradients include the factor, or the write is refused."""
    x = op.inputs.x.nan_to_num().requires_grad_()
    y = op(x, out=out)
    y.mul_(2)
    y.backward(op.inputs.d_y.nan_to_num())
    return [x.grad, y.detach()]


def not_of_leaves(program: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    return functools.wraps(program)(functools.partial(program, is_leaf=False))


ALWAYS_RIGHT = (
    one_leaf,
    separate_gradients,
    backward_twice,
    a_second_consumer,
    out_after_backward,
    not_of_leaves(separate_gradients),
    not_of_leaves(a_second_consumer),
)
RIGHT_OR_ERROR = (two_consumers, not_of_leaves(two_consumers), two_micro_batches, layers_in_a_row)


@pytest.mark.parametrize("program", [*ALWAYS_RIGHT, *RIGHT_OR_ERROR, result_written_in_place])
def test_a_reused_buffer_is_right_or_an_error(op, program):
    """Gradients are those without buffers, whatever the buffer had in between."""
    want = program(op, None, None)
    actual = []
    buffers = [buffer(2 * N, H)[:N] for _ in BOTH]  # views stay plain tensors

    def compute():
        actual.extend(program(op, *buffers))

    def check():
        assert not any(plain.requires_grad for plain in (*buffers, *(b._base for b in buffers)))
        for got, expected in zip(actual, want, strict=True):
            cases.assert_near(used_rows_of(got), used_rows_of(expected), torch.float32)

    if program in ALWAYS_RIGHT:
        compute()
        check()
    else:
        right_or_error(compute, check)


def layer_after_out(op: Op, x: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    """The layer that saves the other's result is a grouped layer."""
    out = buffer()
    z = Op("mlp")(op(x, out=out))
    op(later, out=out)
    return z


def square_through_a_view(op: Op, x: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    memory = buffer(2 * N, H)
    square = op(x, out=memory[:N]) ** 2
    op(x, out=memory[:N].view(N, H))
    return square


def product_with_a_gradient_buffer(op: Op, x: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    """The gradient buffer holds a tensor that a graph still needs."""
    shared = torch.ones(N, H)
    product = torch.ones(N, H, requires_grad=True) * shared
    op(x, grad_input_out=shared).backward(op.inputs.d_y)
    return product


def result_of_an_input(op: Op, x: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    y = op(x)
    x.add_(1)
    return y


@pytest.mark.usefixtures("raw_writes")
@pytest.mark.parametrize(
    "result",
    [
        layer_after_out,
        square_through_a_view,
        product_with_a_gradient_buffer,
        result_of_an_input,
    ],
)
def test_overwriting_saved_tensors_is_an_error(op, result):
    x = op.inputs.x.nan_to_num().requires_grad_()
    later = batches(1)[0].x.nan_to_num()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result(op, x, later).sum().backward()


@pytest.mark.usefixtures("raw_writes")
def test_delayed_gradients_and_reused_buffers():
    """backward_dw of the first micro-batch runs after the second one has overwritten x and d_y of the first."""
    case = cases.Case(delayed=True, buffers=())
    actual = []
    for out, d_mid in ((None, None), (buffer(), buffer())):
        inner = Op("linear", case)
        outer = Op("linear", case)

        def compute(inner=inner, outer=outer, out=out, d_mid=d_mid):
            for batch in batches(2):
                outer(inner(batch.x, out=out), grad_input_out=d_mid).backward(batch.d_y)
            for layer in (inner.fc1, outer.fc1) * 2:
                layer.backward_dw()
            actual.append((inner.fc1.weight.grad, outer.fc1.weight.grad))

        def check():
            for got, want in zip(actual[-1], actual[0], strict=True):
                cases.assert_near(got, want, torch.float32)

        right_or_error(compute, check)
    assert actual


# -- leases -----------------------------------------------------------------------------------------------------------
def leases(heap, count):
    return [heap.lease((N, H), torch.float32, name=f"lease {i}") for i in range(count)]


ENDS = ("kept", "dropped", "released")
# Every two ends of two leases; all dropped.
ENDS_OF_THREE = [(ENDS[i], ENDS[j], ENDS[(i + j) % 3]) for i in range(3) for j in range(3)]
ENDS_OF_THREE += [("dropped",) * 3]


@pytest.mark.parametrize("ends", ENDS_OF_THREE, ids=" ".join)
def test_leases_that_end_before_backward(op, heap, ends):
    """A graph keeps the memory that it needs: no new lease gets it. A use of released memory is correct or an error,
    and never writes into another lease."""
    source = op.inputs.x.nan_to_num().requires_grad_()
    inputs = source, op.fc1.weight
    expected = torch.autograd.grad(used_rows_of(op(source)).square().sum(), inputs)
    op_leases = leases(heap, 3)
    of_rows, out, gradient = (lease.tensor for lease in op_leases)
    y = op(of_rows.copy_(source), out=out, grad_input_out=gradient)
    loss = used_rows_of(y).square().sum()  # keeps y
    del of_rows, out, gradient, y
    for lease in itertools.compress(op_leases, (end == "released" for end in ends)):
        lease.release()
    op_leases[:] = itertools.compress(op_leases, (end == "kept" for end in ends))
    gc.collect()
    new_tensors = [lease.tensor.fill_(cases.SENTINEL) for lease in leases(heap, 4)]
    actual = []

    def check():
        cases.assert_near(*(used_rows_of(of_x) for of_x, _ in (actual[0], expected)), torch.float32)
        cases.assert_near(actual[0][1], expected[1], torch.float32)

    def compute():
        actual.append(torch.autograd.grad(loss, inputs))

    if "released" in ends:
        right_or_error(compute, check)
    else:
        compute()
        check()
    assert all((tensor == cases.SENTINEL).all() for tensor in new_tensors)


# -- graphs that are spent --------------------------------------------------------------------------------------------
def test_retained_losses_keep_no_leases(op, heap):
    x = op.inputs.x.nan_to_num().requires_grad_()
    losses = []
    want = torch.autograd.grad(used_rows_of(op(x)).square().sum(), x)[0]
    for targets in (None, [op.fc1.weight], *[None] * 4):  # once for the gradients of weights alone
        out, grad_input_out = leases(heap, 2)
        loss = (
            used_rows_of(op(x, out=out.tensor, grad_input_out=grad_input_out.tensor)).square().sum()
        )
        del out, grad_input_out
        loss.backward(inputs=targets)
        losses.append(loss)
        assert heap.leased_bytes == 0
    cases.assert_near(used_rows_of(x.grad), 5 * used_rows_of(want).double(), torch.float32)
    assert not heap.owns(x.grad)


def test_a_retained_graph_keeps_its_buffers_until_the_last_backward(op, heap):
    x = op.inputs.x.nan_to_num().requires_grad_()
    out, grad_input_out = leases(heap, 2)
    gradient = grad_input_out.tensor
    y = op(x, out=out.tensor, grad_input_out=gradient)
    loss = used_rows_of(y).square().sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    gradient.fill_(cases.SENTINEL)
    x.grad = None
    loss.backward(retain_graph=True)
    cases.assert_same_bits(used_rows_of(x.grad), used_rows_of(first))
    cases.assert_same_bits(used_rows_of(gradient), used_rows_of(first))
    del out, grad_input_out, gradient, y
    assert heap.leased_bytes > 0
    loss.backward()
    assert heap.leased_bytes == 0
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_failed_backward_can_be_repeated(heap):
    """The graph is not consumed, and still has the caller's buffer."""
    op = Op("linear", cases.Case(main_grad=True, buffers=()))
    x = op.inputs.x.nan_to_num().requires_grad_()
    grad_input_out = heap.lease((N, H), torch.float32).tensor
    y, main_grad = op(x, grad_input_out=grad_input_out), op.fc1.weight.main_grad
    op.fc1.weight.main_grad = None
    with pytest.raises(symmoe.errors.ArgumentError, match="main_grad is missing"):
        y.backward(op.inputs.d_y)
    op.fc1.weight.main_grad = main_grad
    grad_input_out.fill_(cases.SENTINEL)
    y.backward(op.inputs.d_y)
    cases.assert_same_bits(used_rows_of(grad_input_out), op.gradient())


def test_the_returned_gradient_is_the_buffer(op, heap):
    """torch.autograd.grad returns the buffer without a copy, and its caller may use the buffer again."""
    x = op.inputs.x.nan_to_num().requires_grad_()
    grad_input_out = heap.lease((N, H), torch.float32).tensor
    for _ in range(2):
        (gradient,) = torch.autograd.grad(
            used_rows_of(op(x, grad_input_out=grad_input_out)).sum(), x
        )
        assert gradient.data_ptr() == grad_input_out.data_ptr()


# -- with dispatch and combine ----------------------------------------------------------------------------------------
class Step:
    """One rank: dispatch, experts, combine, with or without buffers on the heap."""

    def __init__(self, heap: symmoe.SymmetricHeap) -> None:
        generator = torch.Generator().manual_seed(3)
        self.heap = heap
        self.ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(7)])
        self.x = torch.randn(7, H, generator=generator).requires_grad_()
        self.probs = torch.rand(7, 2, generator=generator).requires_grad_()
        self.d_y = torch.randn(7, H, generator=generator)
        self.model = symmoe.GroupedMLP(4, H, cases.TINY.ffn, bias=True)

    def forward(self, *, on_heap: bool = True) -> torch.Tensor:
        """y; only leases have the buffers' memory."""
        plan = symmoe.make_plan(self.ids, num_experts=4, heap=self.heap)

        def lease() -> torch.Tensor | None:
            return (
                self.heap.lease((plan.row_capacity, H), torch.float32).tensor[: plan.num_rows]
                if on_heap
                else None
            )

        rows, row_probs, handle = symmoe.dispatch_tokens(
            self.x, plan, probs=self.probs, out=lease()
        )
        out = self.model(rows, plan.splits, row_probs, out=lease(), grad_input_out=lease())
        return symmoe.combine_tokens(out, handle, grad_out=lease())

    def run(self, *, on_heap: bool) -> list[torch.Tensor]:
        """y, d_x, d_probs, gradients of the experts."""
        self.model.zero_grad()
        self.x.grad = self.probs.grad = None
        y = self.forward(on_heap=on_heap)
        y.backward(self.d_y)
        return [
            y.detach(),
            self.x.grad,
            self.probs.grad,
            *(p.grad.clone() for p in self.model.parameters()),
        ]


def test_no_copies_between_the_parts(heap):
    step = Step(heap)
    want = step.run(on_heap=False)
    copies = heap.statistics.num_staging_copies
    assert copies > 0
    for _ in range(2):
        for actual, expected in zip(step.run(on_heap=True), want, strict=True):
            cases.assert_same_bits(actual, expected)
    assert heap.statistics.num_staging_copies == copies, (
        "every buffer was read and written in place"
    )


def test_a_second_backward_through_combine(heap):
    """Correct if the graph is retained; an error on every rank if the buffer has been freed."""
    step = Step(heap)
    plan = symmoe.make_plan(step.ids, num_experts=4, heap=heap)
    rows, _, handle = symmoe.dispatch_tokens(step.x, plan)
    leaf = rows.detach().clone().requires_grad_()
    grad_out = heap.lease((plan.row_capacity, H), torch.float32).tensor[: rows.shape[0]]
    y = symmoe.combine_tokens(leaf, handle, grad_out=grad_out)
    y.backward(step.d_y, retain_graph=True)
    first = leaf.grad.clone()
    y.backward(step.d_y)
    cases.assert_same_bits(leaf.grad, 2 * first)
    with pytest.raises(
        symmoe.errors.ArgumentError, match=r"^grad_out was let go of .*retain_graph=True"
    ):
        y.backward(step.d_y)
    assert step.run(on_heap=True)
