"""swap_moe on real transformers models: outputs and all gradients against the unmodified model.

Each rank r has its own tokens and the loss L_r, a mean over them. The reference is the unmodified model, run in one
process on every rank's batch, with averaged gradients: the gradient of (1 / W) sum of L_r. The swapped model computes
the same by backward and symmoe.reduce_gradients.

A tensor agrees if its largest difference is at most BOUND times its largest expected entry; fp32 has 6e-8, and sums
here have up to a few hundred terms. A gradient of zeros must be exact."""

import contextlib
import copy
import math
from types import SimpleNamespace

import pytest
from cluster import run_on

pytest.importorskip("transformers", minversion="5.17")

import torch
import torch.distributed as dist
import transformers
from hf_cases import BOUND, FAMILIES, WRONG, batch_of, error, mean_gradients, random_model, share_of
from programs import printed_by
from worker import assert_refused, open_heap

import symmoe
from symmoe.integrations.transformers import ExpertParallelExperts, StepConfig, swap_moe
from symmoe.integrations.transformers.forms import ExpertsForm, experts_modules


def errors_of(model: torch.nn.Module, gradients: dict) -> dict:
    """Errors of a swapped model's gradients against this rank's part of the unmodified model's."""
    expected = share_of(gradients, dist.get_rank(), dist.get_world_size(), model.config.model_type)
    got = {name: parameter.grad for name, parameter in model.named_parameters()}
    if got.keys() != expected.keys():
        return {"names": math.inf}
    return {name: error(got[name], expected[name]) for name in got}


# -- every family -------------------------------------------------------------------------------------------------


def one_step(
    reference: torch.nn.Module,
    heap: symmoe.SymmetricHeap,
    step: StepConfig | None = None,
    compiles: bool = False,
) -> SimpleNamespace:
    """A swapped copy after a step of all ranks, with gradients compared with those of the reference on all batches."""
    batches = [batch_of(r) for r in range(dist.get_world_size())]
    rank = dist.get_rank()
    model = swap_moe(copy.deepcopy(reference), heap, step=step)
    gradients, outputs = mean_gradients(reference, batches)
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
    output = forward(batches[rank], labels=batches[rank])
    output.loss.backward()
    raw = errors_of(model, gradients)
    symmoe.reduce_gradients(model)
    errors = errors_of(model, gradients)
    assert max(errors.values()) < BOUND, {
        name: error for name, error in errors.items() if error >= BOUND
    }
    if len(batches) > 1:  # negative control: without the reduction
        assert raw["model.embed_tokens.weight"] > WRONG
    return SimpleNamespace(
        model=model, output=output, raw=raw, gradients=gradients, seen=outputs[rank]
    )


def slow(function: str, num_ranks: int, family: str, **options):
    arguments = function, num_ranks, family, options
    return pytest.param(*arguments, marks=pytest.mark.slow)


def compare(
    rank: int,
    num_ranks: int,
    family: str,
    ranks_per_node: int | None = None,
    hidden_act: str = "silu",
    **options,
) -> None:
    """Compares outputs, all gradients and their norm."""
    with open_heap("cpu", ranks_per_node=ranks_per_node) as heap:
        assert heap.topology.num_nodes == num_ranks // (ranks_per_node or num_ranks)
        step = one_step(random_model(family, hidden_act=hidden_act), heap, **options)
        output, (loss, logits, aux_loss), names = step.output, step.seen, set(step.gradients)
        assert error(output.loss.detach(), loss) < BOUND
        assert error(output.logits.detach(), logits) < BOUND
        assert (aux_loss is None) == (family == "deepseek_v3")
        assert aux_loss is None or error(output.aux_loss.detach(), aux_loss.detach()) < BOUND
        norm = (
            torch.stack([gradient.square().sum() for gradient in step.gradients.values()])
            .sum()
            .sqrt()
        )
        assert error(symmoe.training.clip_grad_norm(step.model, 1e-3), norm) < BOUND
        assert any("mlp.experts.down_proj" in name for name in names)
        assert any("gate.weight" in name or "router.weight" in name for name in names)
        assert any("shared_experts" in name for name in names) == (family == "deepseek_v3")
        if num_ranks == 2:  # the sum over ranks, not the mean
            experts = [ratio for name, ratio in step.raw.items() if "mlp.experts.mlp.fc2" in name]
            assert experts == pytest.approx([1.0] * len(experts), abs=1e-3)


STATIC = StepConfig(capacity=256, max_tokens=32, order="slot", stash="none")
COMPARED = [  # (kind of case, ranks, family, arguments of `compare`); nodes are virtual ones
    *(("one node", 1, family, {}) for family in FAMILIES),
    *(slow("one node", 4, family) for family in FAMILIES),
    *(("one node", 2, family, {}) for family in FAMILIES),
    ("another activation", 2, "olmoe", {"hidden_act": "gelu"}),
    ("another step", 2, "qwen3_moe", {"step": STATIC}),
    slow("compiled", 2, "deepseek_v3", compiles=True),
    ("several nodes", 2, FAMILIES[0], {"ranks_per_node": 1}),
    *(slow("several nodes", 2, family, ranks_per_node=1) for family in FAMILIES[1:]),
    *(
        slow("several nodes", 4, family, ranks_per_node=2)
        for family in ("qwen3_moe", "deepseek_v3")
    ),
]


@pytest.mark.parametrize(("function", "num_ranks", "family", "options"), COMPARED, ids=str)
def test_outputs_and_all_gradients_equal_the_unmodified_model(
    cluster, function: str, num_ranks: int, family: str, options: dict
):
    cluster(num_ranks).run(compare, family, **options)


@pytest.mark.parametrize("is_gated", [True, False])
def test_activations_are_those_of_transformers(is_gated: bool):
    h = torch.randn(50, 8)
    covered = set()
    for name in transformers.activations.ACT2FN:
        first = f"{'gate_' if is_gated else ''}up_proj"
        experts = SimpleNamespace(has_gate=is_gated, has_bias=False, is_transposed=False)
        experts.act_fn = act = transformers.activations.ACT2FN[name]
        experts._apply_gate = lambda h, act=act: act(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]
        experts.named_parameters = lambda first=first: [(first, None), ("down_proj", None)]
        with contextlib.suppress(symmoe.errors.ArgumentError):
            activation = ExpertsForm.of(experts).activation
            want = experts._apply_gate(h) if is_gated else experts.act_fn(h)
            torch.testing.assert_close(
                symmoe.grouped.ScaledActivation(activation)(h, torch.ones(50)), want, msg=name
            )
            covered.add(name)
    uncovered = {
        "relu",
        "tanh",
        "sigmoid",
        "mish",
        "leaky_relu",
        "relu6",
        "linear",
        "gelu_10",
        "laplace",
    }
    assert covered.isdisjoint(uncovered)
    assert covered >= {
        "silu",
        "swish",
        "gelu",
        "gelu_new",
        "gelu_fast",
        "gelu_pytorch_tanh",
        "relu2",
    }


def test_the_callers_torch_defaults_do_not_change_the_form():
    (_, experts), *_ = experts_modules(random_model("gpt_oss"))
    form = ExpertsForm.of(experts)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert ExpertsForm.of(experts) == form
    finally:
        torch.set_default_dtype(before)


# -- ranks and experts without tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
@run_on(2)
def test_rank_and_experts_without_tokens(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap, family: str
) -> None:
    """All tokens choose experts 0, 1 (and 2); rank 1 receives no rows, and takes part in backward."""
    reference = random_model(family)
    with torch.no_grad():
        for name, tensor in reference.state_dict().items():
            if name.endswith(("e_score_correction_bias", "router.bias")):
                tensor[:3] += 100
    model = one_step(reference, heap).model
    experts = [
        p.grad
        for m in model.modules()
        if isinstance(m, ExpertParallelExperts)
        for p in m.mlp.parameters()
    ]
    empty = slice(3, None) if rank == 0 else slice(None)
    assert not any(gradient[empty].any() for gradient in experts)
    assert any(gradient.any() for gradient in experts) == (rank == 0)


# -- what is imported ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_only_modules_that_need_transformers_import_it():
    code = (
        "import sys, symmoe.integrations\n"
        "from symmoe.integrations.transformers import StepConfig, load_checkpoint, save_checkpoint, swap_moe\n"
        "assert 'transformers' not in sys.modules\n"
        "import symmoe.integrations.transformers as ours\n"
        "assert set(ours.__all__) <= set(dir(ours))\n"
        "assert all(getattr(ours, name) for name in ours.__all__ if name != 'register')\n"
        "assert 'transformers' in sys.modules\n"
    )
    printed_by("-c", code)


# -- what is refused ----------------------------------------------------------------------------------------------


def test_models_that_cannot_be_swapped_are_refused(heap: symmoe.SymmetricHeap):
    model = random_model("qwen3_moe")
    state = torch.get_rng_state()
    assert swap_moe(model, heap) is model
    assert torch.equal(torch.get_rng_state(), state)
    relu = random_model("olmoe", hidden_act="relu")
    dense = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=61)
    )
    assert_refused(
        (lambda: swap_moe(model, heap), "no experts to replace"),
        (lambda: model.save_pretrained("nowhere"), "save_checkpoint"),
        (
            lambda: swap_moe(relu, heap),
            r"OlmoeExperts computes .*_apply_gate with ReLU .* symmoe has silu, gelu",
        ),
        (
            lambda: swap_moe(dense, heap),
            r"LlamaForCausalLM has no experts .* through its experts interface",
        ),
        (lambda: StepConfig(stash="some"), r"stash \('some'\)"),
    )


@run_on(2)
def test_wrong_arguments_on_one_rank_raise_on_all(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap
) -> None:
    odd = random_model("olmoe", num_experts=7)
    before = odd.model.layers[0].mlp.experts
    with pytest.raises(
        symmoe.errors.ArgumentError, match=r"\(7\) must be divisible by the number of ranks \(2\)"
    ):
        swap_moe(odd, heap)
    assert odd.model.layers[0].mlp.experts is before
    experts = swap_moe(random_model("olmoe"), heap).model.layers[0].mlp.experts
    x = torch.zeros(4, 32)
    idx = torch.zeros(4, 2, dtype=torch.int64)
    weights = torch.zeros(4, 2)
    for text, bad in {
        r"\[4, 8\].*\[T, 32\]": (x[:, :8], idx, weights),
        r"\[4, 2\].*\[3, 2\]": (x, idx, weights[:3]),
        "8": (x, idx + 8, weights),
    }.items():
        with pytest.raises(symmoe.errors.ArgumentError, match=text):
            experts(*(bad if rank else (x, idx, weights)))
    assert experts(x, idx, weights).shape == x.shape
