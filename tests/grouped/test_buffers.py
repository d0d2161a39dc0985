"""Buffers of the caller: what is refused, and that using one again is right or an error, never silently wrong."""

import functools
import gc
import itertools
from collections.abc import Callable
from contextlib import nullcontext

import grouped_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import symmoe
from symmoe.checks.arguments import Buffer, overlap_problem
from symmoe.kernels import twin

PLAIN = cases.Case(buffers=())
N, H = cases.TINY.num_rows, cases.TINY.hidden
BOTH = ("out", "grad_input_out")


class Op:
    """One of WAYS, H -> H, with its own parameters; called as op(x, out=..., grad_input_out=...)."""

    def __init__(self, name: str, case: cases.Case = PLAIN) -> None:
        self.inputs = cases.make_inputs(case, width=H if name == "linear" else None)
        self.scale, self.splits = self.inputs.scale, self.inputs.splits
        activation, path = symmoe.grouped.ScaledSwiGLU(), name
        if name == "modules":  # of one Sequential
            activation.register_forward_hook(lambda *_: None)
            path = "sequential"
        self.call, self.layers = cases.make_way(path, case, self.inputs, activation=activation)
        self.fc1 = next(iter(self.layers.values()))

    def __call__(self, x, **buffers):
        return self.call(x, self.scale, self.splits, **buffers)

    def parameters(self) -> list[nn.Parameter]:
        return [param for layer in self.layers.values() for param in layer.parameters()]

    def gradient(self) -> torch.Tensor:
        """Of the x of its inputs for their d_y, without buffers."""
        x = self.inputs.x.clone().requires_grad_()
        return torch.autograd.grad(self(x), x, self.inputs.d_y)[0][: cases.TINY.num_used]


@pytest.fixture(params=cases.WAYS)
def op(request) -> Op:
    return Op(request.param)


@pytest.fixture(params=[name for name in cases.WAYS if name != "modules"])
def single(request) -> Op:
    """An op whose backward is one step, which reads the gradient of the result while it writes that of x."""
    return Op(request.param)


@pytest.fixture
def raw_writes(monkeypatch) -> None:
    """Twins that write past autograd's version counters, as kernels on GPUs do."""

    def write(kernel, rows, weight, row_range, out, **options):
        kernel(rows, weight, row_range, out.data, **options)

    for name in ("grouped_gemm", "grouped_gemm_dgrad"):
        monkeypatch.setattr(twin, name, functools.partial(write, getattr(twin, name)))


used_rows_of = functools.partial(cases.used, sizes=cases.TINY)


def buffer(*shape: int) -> torch.Tensor:
    return torch.full(shape or (N, H), cases.SENTINEL)


def right_or_error(compute: Callable[[], None], check: Callable[[], None]) -> None:
    """The rule for every reuse: what comes out is right, or there is an error."""
    try:
        compute()
    except (symmoe.errors.ArgumentError, symmoe.errors.StaleLease):
        return
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        return
    check()


# -- one call: where a buffer may lie ---------------------------------------------------------------------------------
@settings(max_examples=150)
@given(path=st.sampled_from(cases.WAYS), name=st.sampled_from(BOTH), data=st.data())
def test_a_buffer_overlaps_nothing_that_the_call_uses(path: str, name: str, data: st.DataObject):
    """One tensor that the call reads, or the second buffer, starts at any 16th byte around the first buffer."""
    op = Op(path)
    (second_name,) = {*BOTH} - {name}
    buffers = {name: buffer(), second_name: buffer()}
    tensors = [op.inputs.x, op.splits, buffers[second_name], *op.parameters()]
    tensors += [] if path == "linear" else [op.scale]
    tensor = tensors[data.draw(st.integers(0, len(tensors) - 1), label="tensor")]
    size = buffers[name].nbytes
    edges = st.sampled_from((-tensor.nbytes, 16 - tensor.nbytes, size - 16, size))
    any_start = st.integers(-tensor.nbytes // 16, size // 16).map(lambda step: 16 * step)
    start = data.draw(edges | any_start, label="bytes behind the start of the buffer")
    memory = torch.zeros(2 * tensor.nbytes + size, dtype=torch.uint8)
    for offset, moved in ((0, buffers[name]), (start, tensor)):
        target = memory.data[tensor.nbytes + offset :][: moved.nbytes]  # .data: versions of its own
        moved.data = target.view(moved.dtype).view(moved.shape).copy_(moved.data)
    before = memory.clone()
    if -tensor.nbytes < start < size:
        for context in (nullcontext, torch.no_grad, torch.inference_mode):
            with context(), cases.refused(f"overlaps a tensor of shape {list(tensor.shape)}"):
                op(op.inputs.x, **buffers)
        assert torch.equal(memory, before), "something has been written"
        assert tensor is buffers[second_name] or (buffers[second_name] == cases.SENTINEL).all()
        buffers = {}
    for actual, expected in zip(results_of(op, **buffers), results_of(Op(path)), strict=True):
        cases.assert_same_bits(actual, expected)


def results_of(op: Op, **buffers: torch.Tensor) -> list[torch.Tensor]:
    """y, and the gradients of x and of the parameters."""
    x = op.inputs.x.detach().requires_grad_()
    y = op(x, **buffers)
    y.backward(op.inputs.d_y)
    return [used_rows_of(y), used_rows_of(x.grad), *(param.grad for param in op.parameters())]


# -- what is refused --------------------------------------------------------------------------------------------------
MISTAKES = {  # the buffer for an x, parts of the text
    "list": (lambda x: [1.0], ["(list)", "tensor"]),
    "sparse": (lambda x: buffer().to_sparse(), ["(torch.sparse_coo) must be a strided tensor"]),
    "a row more": (
        lambda x: buffer(N + 1, H),
        [f"shape [{N + 1}, {H}]", f"must be [{N}, {H}]"],
    ),
    "without the tail": (lambda x: buffer(9, H), [f"shape [9, {H}]", f"must be [{N}, {H}]"]),
    "a column more": (
        lambda x: buffer(N, H + 1),
        [f"shape [{N}, {H + 1}]", f"must be [{N}, {H}]"],
    ),
    "flat": (lambda x: buffer(N * H), [f"shape [{N * H}]", f"must be [{N}, {H}]"]),
    "N-D for 2D": (lambda x: buffer(3, 4, H), [f"shape [3, 4, {H}]", f"must be [{N}, {H}]"]),
    "dtype": (lambda x: buffer().bfloat16(), ["dtype torch.bfloat16", "must be torch.float32"]),
    "double": (lambda x: buffer().double(), ["dtype torch.float64", "must be torch.float32"]),
    "device": (lambda x: buffer().to("meta"), ["is on meta", "must be on cpu"]),
    "strided": (lambda x: buffer(N, 2 * H)[:, ::2], [f"strides [{2 * H}, 2]", "contiguous"]),
    "transposed": (lambda x: buffer(H, N).t(), [f"strides [1, {N}]", "contiguous"]),
    "expanded": (lambda x: buffer(1, H).expand(N, H), [f"strides [0, {1}]", "contiguous"]),
    "gradient": (lambda x: buffer().requires_grad_(), ["requires a gradient"]),
    "history": (lambda x: buffer().requires_grad_() * 1, ["requires a gradient"]),
    "address": (
        lambda x: buffer(N * H + 1)[1:].view(N, H),
        ["starts at address", "aligned to 16"],
    ),
    "input": (lambda x: x.detach(), ["overlaps"]),
}


@pytest.mark.parametrize(("make", "parts"), MISTAKES.values(), ids=MISTAKES)
def test_refused_in_forward(op, make, parts):
    x = op.inputs.x.nan_to_num()
    wrong = make(x)
    second = buffer()
    expected = op(x)
    before = x.clone()
    contexts = nullcontext, torch.no_grad, torch.inference_mode
    for (name, right), context in itertools.product((BOTH, BOTH[::-1]), contexts):
        with context(), pytest.raises(symmoe.errors.ArgumentError) as caught:
            op(x, **{right: second, name: wrong})
        text = str(caught.value)
        assert text.startswith(name)
        for part in parts:
            assert part in text
    assert (second == cases.SENTINEL).all(), "nothing has been computed"
    cases.assert_same_bits(x, before)
    out = buffer()
    y = op(x, out=out, grad_input_out=buffer())
    cases.assert_same_bits(y[: cases.TINY.num_used], expected[: cases.TINY.num_used])
    assert y.data_ptr() == out.data_ptr()


def test_an_empty_tensor_overlaps_nothing():
    """It has an address all the same."""
    memory = torch.zeros(8, 4)
    assert overlap_problem([Buffer("out", memory)], [memory[4:4]]) is None
    assert overlap_problem([Buffer("out", memory[:4])], [memory[4:]]) is None
    assert "overlaps a tensor of shape [5, 4]" in str(
        overlap_problem([Buffer("out", memory[:4])], [memory[3:]])
    )


def released(heap: symmoe.SymmetricHeap, like: torch.Tensor) -> torch.Tensor:
    """A view of memory that was a lease's, and that somebody else has by now."""
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
    ("x", lambda released: LINEAR(released(INPUTS.x), SPLITS)),
    ("splits", lambda released: LINEAR(INPUTS.x, released(SPLITS))),
    ("bias_scale", lambda released: LINEAR(INPUTS.x, SPLITS, bias_scale=released(INPUTS.scale))),
    *(
        (name, lambda released, call=call, name=name: call(**{name: released(INPUTS.x)}))
        for name in BOTH
        for call in (
            functools.partial(LINEAR, INPUTS.x, SPLITS),
            functools.partial(MLP, INPUTS.x, SPLITS, INPUTS.scale),
        )
    ),
    ("rows", lambda released: MLP(released(INPUTS.x), SPLITS, INPUTS.scale)),
    ("splits", lambda released: MLP(INPUTS.x, released(SPLITS), INPUTS.scale)),
    ("row_probs", lambda released: MLP(INPUTS.x, SPLITS, released(INPUTS.scale))),
    ("h", lambda released: SWIGLU(released(INPUTS.x), INPUTS.scale)),
    ("scale", lambda released: SWIGLU(INPUTS.x, released(INPUTS.scale))),
    ("x", lambda released: MODULES(released(INPUTS.x), SPLITS, INPUTS.scale, SPLITS)),
    ("splits", lambda released: MODULES(INPUTS.x, SPLITS, INPUTS.scale, released(SPLITS))),
    ("scale", lambda released: MODULES(INPUTS.x, SPLITS, released(INPUTS.scale), SPLITS)),
    ("d_y", lambda released: LINEAR(INPUTS.x, SPLITS).backward(released(INPUTS.d_y))),
    ("d_y", lambda released: MLP(INPUTS.x, SPLITS, INPUTS.scale).backward(released(INPUTS.d_y))),
    (
        "d_y",
        lambda released: MODULES(INPUTS.x, SPLITS, INPUTS.scale, SPLITS).backward(
            released(INPUTS.d_y)
        ),
    ),
]


@pytest.mark.parametrize(("name", "call"), CALLS_WITH_RELEASED_MEMORY)
def test_every_tensor_of_a_call_must_live(heap, name, call):
    with pytest.raises(
        symmoe.errors.StaleLease, match=rf"^{name} is memory of lease 'mine' \(generation 1\)"
    ):
        call(lambda like: released(heap, like))
    call(lambda like: heap.lease(tuple(like.shape), like.dtype).tensor.copy_(like))


def test_gradient_buffer_is_where_the_gradient_comes_from(single):
    grad_input_out = buffer()
    x = single.inputs.x.clone().requires_grad_()
    y = single(x, grad_input_out=grad_input_out)
    with pytest.raises(symmoe.errors.ArgumentError, match=r"grad_input_out.*overlaps"):
        y.backward(grad_input_out)
    y = single(x, grad_input_out=grad_input_out)
    y.backward(single.inputs.d_y)
    cases.assert_same_bits(used_rows_of(x.grad), single.gradient())


# -- using a buffer again ---------------------------------------------------------------------------------------------
def batches(count: int = 3) -> list[cases.Inputs]:
    return [cases.make_inputs(PLAIN, seed=10 + i) for i in range(count)]


Memory = torch.Tensor | None  # a buffer that is used again and again, or none


def one_leaf(op: Op, out: Memory, gradient: Memory) -> list[torch.Tensor]:
    """Autograd must not take the buffer itself for the leaf's `.grad`."""
    x = op.inputs.x.clone().requires_grad_()
    for batch in batches():
        with torch.no_grad():
            x.copy_(batch.x)
        op(x, out=out, grad_input_out=gradient).backward(batch.d_y)
        assert gradient is None or x.grad.data_ptr() != gradient.data_ptr()
    return [x.grad]


def gradients_of_their_own(
    op: Op, out: Memory, gradient: Memory, is_leaf: bool = True
) -> list[torch.Tensor]:
    """A `.grad`, of a leaf or retained, of an earlier micro-batch is not overwritten by a later one."""
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
    """In one backward: the producers of both x run after both gradients have been written."""
    leaves = [batch.x.nan_to_num().requires_grad_() for batch in batches(2)]
    ys = [op(leaf * (2 + i), grad_input_out=gradient) for i, leaf in enumerate(leaves)]
    torch.autograd.backward(ys, [batch.d_y.nan_to_num() for batch in batches(2)])
    return [leaf.grad for leaf in leaves]


def layers_in_a_row(op: Op, out: Memory, gradient: Memory) -> list[torch.Tensor]:
    """The outer gradient is read while the inner one is written."""
    x = op.inputs.x.nan_to_num().requires_grad_()
    y = op(op(x, grad_input_out=gradient), grad_input_out=gradient)
    return [torch.autograd.grad(y, x, op.inputs.d_y.nan_to_num())[0]]


def a_checkpoint_after_a_gradient(op: Op, out: Memory, gradient: Memory) -> list[torch.Tensor]:
    """In backward the checkpoint writes its result into memory with a gradient that autograd still needs."""
    leaf = op.inputs.x.nan_to_num().requires_grad_()
    x = leaf * 2
    first = checkpoint(lambda x: op(x, out=gradient), x, use_reentrant=False) * 2
    second = op(x, grad_input_out=gradient) * 2
    torch.autograd.backward([first, second], [op.inputs.d_y.nan_to_num()] * 2)
    return [leaf.grad]


def result_written_in_place(op: Op, out: Memory, gradient: Memory) -> list[torch.Tensor]:
    """y.mul_(2) writes into the caller's buffer; gradients know of it, or it is refused."""
    x = op.inputs.x.nan_to_num().requires_grad_()
    y = op(x, out=out)
    y.mul_(2)
    y.backward(op.inputs.d_y.nan_to_num())
    return [x.grad, y.detach()]


def not_of_leaves(program: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    return functools.wraps(program)(functools.partial(program, is_leaf=False))


ALWAYS_RIGHT = (
    one_leaf,
    gradients_of_their_own,
    backward_twice,
    a_second_consumer,
    out_after_backward,
    not_of_leaves(gradients_of_their_own),
    not_of_leaves(a_second_consumer),
)
RIGHT_OR_ERROR = (
    two_consumers,
    not_of_leaves(two_consumers),
    two_micro_batches,
    layers_in_a_row,
    a_checkpoint_after_a_gradient,
)


@pytest.mark.parametrize("program", [*ALWAYS_RIGHT, *RIGHT_OR_ERROR, result_written_in_place])
def test_a_buffer_that_is_used_again(op, program):
    """Gradients are those without buffers, whatever has been in them meanwhile."""
    expected = program(op, None, None)
    results = []
    buffers = [buffer(2 * N, H)[:N] for _ in BOTH]  # views stay plain tensors

    def compute():
        results.extend(program(op, *buffers))

    def check():
        assert not any(plain.requires_grad for plain in (*buffers, *(b._base for b in buffers)))
        for actual, reference in zip(results, expected, strict=True):
            cases.assert_near(used_rows_of(actual), used_rows_of(reference), torch.float32)

    if program in ALWAYS_RIGHT:
        compute()
        check()
    else:
        right_or_error(compute, check)


def layer_after_out(op: Op, x: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    """It is one of our own layers that keeps the result of another."""
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
    """The gradient buffer held something that a graph still needs."""
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
def test_what_a_graph_needs_is_written_over(op, result):
    x = op.inputs.x.nan_to_num().requires_grad_()
    later = batches(1)[0].x.nan_to_num()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result(op, x, later).sum().backward()


@pytest.mark.usefixtures("raw_writes")
def test_delayed_gradients_and_buffers_that_are_used_again():
    """backward_dw of the first micro-batch comes after the second one has written x and d_y of the first."""
    case = cases.Case(delayed=True, buffers=())
    results = []
    for out, d_mid in ((None, None), (buffer(), buffer())):
        inner = Op("linear", case)
        outer = Op("linear", case)

        def compute(inner=inner, outer=outer, out=out, d_mid=d_mid):
            for batch in batches(2):
                outer(inner(batch.x, out=out), grad_input_out=d_mid).backward(batch.d_y)
            for layer in (inner.fc1, outer.fc1) * 2:
                layer.backward_dw()
            results.append((inner.fc1.weight.grad, outer.fc1.weight.grad))

        def check():
            for actual, expected in zip(results[-1], results[0], strict=True):
                cases.assert_near(actual, expected, torch.float32)

        right_or_error(compute, check)
    assert results


# -- leases -----------------------------------------------------------------------------------------------------------
def leases(heap, count):
    return [heap.lease((N, H), torch.float32, name=f"lease {i}") for i in range(count)]


ENDS = ("kept", "dropped", "released")
# Every two ends of two leases; all dropped.
ENDS_OF_THREE = [(ENDS[i], ENDS[j], ENDS[(i + j) % 3]) for i in range(3) for j in range(3)]
ENDS_OF_THREE += [("dropped",) * 3]


@pytest.mark.parametrize("ends", ENDS_OF_THREE, ids=" ".join)
def test_leases_that_end_before_backward(op, heap, ends):
    """A graph keeps the memory of what it still needs: nobody else gets it. Of what was released, it is right or an
    error, and memory of somebody else is not written."""
    source = op.inputs.x.nan_to_num().requires_grad_()
    inputs = source, op.fc1.weight
    expected = torch.autograd.grad(used_rows_of(op(source)).square().sum(), inputs)
    open_leases = leases(heap, 3)
    of_rows, out, gradient = (lease.tensor for lease in open_leases)
    y = op(of_rows.copy_(source), out=out, grad_input_out=gradient)
    loss = used_rows_of(y).square().sum()  # keeps y
    del of_rows, out, gradient, y
    for lease in itertools.compress(open_leases, (end == "released" for end in ends)):
        lease.release()
    open_leases[:] = itertools.compress(open_leases, (end == "kept" for end in ends))
    gc.collect()
    later_tensors = [lease.tensor.fill_(cases.SENTINEL) for lease in leases(heap, 4)]
    gradients = []

    def check():
        cases.assert_near(
            *(used_rows_of(of_x) for of_x, _ in (gradients[0], expected)), torch.float32
        )
        cases.assert_near(gradients[0][1], expected[1], torch.float32)

    def compute():
        gradients.append(torch.autograd.grad(loss, inputs))

    if "released" in ends:
        right_or_error(compute, check)
    else:
        compute()
        check()
    assert all((tensor == cases.SENTINEL).all() for tensor in later_tensors)


# -- graphs that are spent --------------------------------------------------------------------------------------------
def test_losses_that_are_kept_keep_no_leases(op, heap):
    x = op.inputs.x.nan_to_num().requires_grad_()
    losses = []
    expected = torch.autograd.grad(used_rows_of(op(x)).square().sum(), x)[0]
    for inputs in (None, [op.fc1.weight], *[None] * 4):  # once for the gradients of weights alone
        out, grad_input_out = leases(heap, 2)
        loss = (
            used_rows_of(op(x, out=out.tensor, grad_input_out=grad_input_out.tensor)).square().sum()
        )
        del out, grad_input_out
        loss.backward(inputs=inputs)
        losses.append(loss)
        assert heap.leased_bytes == 0
    cases.assert_near(used_rows_of(x.grad), 5 * used_rows_of(expected).double(), torch.float32)
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


def test_a_backward_that_fails_can_be_tried_again(heap):
    """The graph is not spent: its buffer is still the one that was given."""
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


def test_the_gradient_that_is_asked_for_is_the_buffer(op, heap):
    """torch.autograd.grad gives it out without a copy, and whoever has it may use the buffer again."""
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
        """y; the buffers live on the heap and nowhere else."""
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
    expected = step.run(on_heap=False)
    copies = heap.statistics.num_staging_copies
    assert copies > 0
    for _ in range(2):
        for actual, reference in zip(step.run(on_heap=True), expected, strict=True):
            cases.assert_same_bits(actual, reference)
    assert heap.statistics.num_staging_copies == copies, (
        "every buffer was read and written in place"
    )


def test_a_second_backward_through_combine(heap):
    """Right if the graph is retained; an error, on every rank alike, if its buffer has been let go of."""
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
