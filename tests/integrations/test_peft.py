"""peft's LoRA on swapped models, wrapped before or after the swap, against peft on the unmodified model in one
process."""

import copy
from functools import partial
from pathlib import Path

import pytest
from cluster import run_on

pytest.importorskip("transformers", minversion="5.17")
pytest.importorskip("peft", minversion="0.21")

import peft
import torch
import transformers
from hf_cases import FAMILIES, random_model
from safetensors.torch import load_file
from trainer_cases import (
    EVERY,
    KEPT,
    Job,
    Run,
    eval_data,
    resumed,
    small_model,
    trained,
    with_torch,
)
from worker import assert_refused

import symmoe
from symmoe.integrations.peft import get_peft_model, load_adapters, save_adapters
from symmoe.integrations.transformers import Trainer, swap_moe

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CONFIGS: dict[str, dict] = {
    "target_parameters": {"target_parameters": EXPERTS, "target_modules": ["q_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "experts, gaussian": {
        "target_parameters": EXPERTS,
        "init_lora_weights": "gaussian",
        "use_rslora": True,
    },
}
BOUND = 1e-6


def config_of(name: str) -> peft.LoraConfig:
    return peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **copy.deepcopy(CONFIGS[name]))


def wrapped_by_peft(model, config: peft.LoraConfig) -> peft.PeftModel:
    """The model with peft's adapters; equal models get equal adapters."""
    torch.manual_seed(7)
    return peft.get_peft_model(model, config)


def wrapped(
    model, config: peft.LoraConfig, heap: symmoe.SymmetricHeap, order: str
) -> peft.PeftModel:
    """The same adapters, on a model with this rank's experts."""
    if order == "wrap first":
        return swap_moe(wrapped_by_peft(model, config), heap)
    swap_moe(model, heap)
    torch.manual_seed(7)
    return get_peft_model(model, config)


ORDERS = ("swap first", "wrap first")


def loaded_and_saved(
    rank: int,
    num_ranks: int,
    heap: symmoe.SymmetricHeap,
    family: str,
    config: str,
    order: str,
    source: str,
    out: str,
) -> dict:
    """Loads a file's adapters into a swapped model and saves them again; also returns the outputs."""
    model = wrapped(random_model(family), config_of(config), heap, order)
    load_adapters(model, source)
    logits = model.eval()(eval_data()[rank]["input_ids"][None]).logits.detach()
    save_adapters(model, out)
    return {
        "logits": logits,
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("family", "config"),
    [("qwen3_moe", config) for config in CONFIGS]
    + [(family, "all-linear") for family in FAMILIES if family != "qwen3_moe"]
    + [("gpt_oss", "target_parameters")],
)
def test_adapters_of_peft_keep_outputs_and_bytes(
    cluster, tmp_path: Path, family: str, config: str, order: str
):
    """For every family: as many numbers are trained as on the plain model; adapters from peft's files give the same
    outputs, and are saved with the same bytes."""
    values = config_of(config)
    values.init_lora_weights = False  # adapters that do something
    plain = peft.get_peft_model(random_model(family), values).eval()
    plain.save_pretrained(tmp_path / "plain")
    results = cluster(2).run(
        loaded_and_saved, family, config, order, str(tmp_path / "plain"), str(tmp_path / "ours")
    )
    for rank, result in enumerate(results):
        logits = plain(eval_data()[rank]["input_ids"][None]).logits
        assert (result["logits"] - logits).abs().max() <= 2e-5 * logits.abs().max()
    saved, original = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "plain")
    )
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[key], original[key]) for key in original)
    num_adapters = sum(tensor.numel() for tensor in original.values())
    num_expert_adapters = sum(
        tensor.numel() for key, tensor in original.items() if ".experts." in key
    )
    assert num_expert_adapters > 0 or (family, config) == (
        "gpt_oss",
        "all-linear",
    )  # as peft has it for this family
    assert [result["trained"] for result in results] == [
        num_adapters - num_expert_adapters // 2
    ] * 2
    again = peft.PeftModel.from_pretrained(random_model(family), tmp_path / "ours").eval()
    ids = eval_data()[0]["input_ids"][None]
    assert torch.equal(again(ids).logits, plain(ids).logits)


def adapted_curve(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap, config: str, order: str
) -> Run:
    model = wrapped(small_model(), config_of(config), heap, order)
    return with_torch(model, Job(rank, num_ranks, max_norm=0.02, reduces=True))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(name, marks=[] if name == "target_parameters" else pytest.mark.slow)
        for name in CONFIGS
    ],
)
def test_adapters_train_as_on_the_plain_model(cluster, config: str, order: str):
    """The same first values for the same seed, and the same steps."""
    expected = with_torch(wrapped_by_peft(small_model(), config_of(config)), Job(max_norm=0.02))
    for run in cluster(2).run(adapted_curve, config, order):
        assert run.losses == pytest.approx(expected.losses, rel=BOUND)
        assert run.norms == pytest.approx(expected.norms, rel=100 * BOUND)
    assert expected.losses[-1] < 0.98 * expected.losses[0]
    assert min(expected.norms) > 0.02


def in_a_trainer(
    rank: int, num_ranks: int, trainer_heap: symmoe.SymmetricHeap, folder: str, order: str
) -> tuple[list[float], list[float], list[str]]:
    """Losses, losses after a checkpoint, and the files of a checkpoint."""
    model = wrapped(small_model(), config_of("target_parameters"), trainer_heap, order)
    trainer, logs = trained(Trainer, model, folder, num_ranks, **KEPT, max_grad_norm=0.02)
    trainer.save_model()
    names = sorted(path.name for path in Path(folder, f"checkpoint-{EVERY}").iterdir())
    model = wrapped(small_model(), config_of("target_parameters"), trainer_heap, order)
    return logs.losses, resumed(model, folder, num_ranks, max_grad_norm=0.02), names


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_adapters_in_a_trainer_train_and_resume_as_on_the_plain_model(
    cluster, tmp_path: Path, order: str
):
    plain = wrapped_by_peft(small_model(), config_of("target_parameters"))
    _, logs = trained(transformers.Trainer, plain, str(tmp_path / "one"), 1, max_grad_norm=0.02)
    losses, after, names = cluster(2).run(in_a_trainer, str(tmp_path / "two"), order)[0]
    assert losses == pytest.approx(logs.losses, rel=BOUND)
    assert after == losses[2 * EVERY :]
    assert "adapter_model.safetensors" in names
    assert not any(name.startswith("model") for name in names)
    best = peft.PeftModel.from_pretrained(
        small_model(), tmp_path / "two"
    ).state_dict()  # what save_model wrote
    first = peft.PeftModel.from_pretrained(
        small_model(), tmp_path / "two" / f"checkpoint-{EVERY}"
    ).state_dict()
    assert all(torch.equal(best[name], first[name]) for name in first)


# -- what is refused --------------------------------------------------------------------------------------------------
@run_on(2)
def test_adapters_that_experts_cannot_have_are_refused(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    ids = eval_data()[rank]["input_ids"][None]
    model = peft.get_peft_model(swap_moe(small_model(), heap), config_of("all-linear"))
    names = [f"{EXPERTS[0].rpartition('.')[0]}.mlp.fc{layer}.weight" for layer in (1, 2)]
    every = config_of("all-linear")
    single = peft.LoraConfig(target_parameters=EXPERTS[:1])
    inner = peft.LoraConfig(target_parameters=names)
    of_inner = peft.get_peft_model(swap_moe(small_model(), heap), inner)
    adapted = peft.get_peft_model(small_model(), every).get_base_model()
    twice = peft.get_peft_model(small_model(), every)
    twice.add_adapter("more", config_of("all-linear"))
    swapped = swap_moe(small_model(), heap)
    of_one = peft.get_peft_model(small_model(), single)
    assert_refused(
        (lambda: model(ids), "would train fewer adapters"),
        (lambda: copy.deepcopy(model)(ids), "would train fewer adapters"),
        (lambda: of_inner(ids), "get_peft_model of a model whose experts are swapped"),
        (lambda: get_peft_model(swapped, single), "both gate_up_proj and down_proj"),
        (lambda: swap_moe(of_one, heap), "both gate_up_proj and down_proj"),
        (lambda: get_peft_model(small_model(), every), "swap_moe comes first"),
        (lambda: swap_moe(adapted, heap), "has adapters of peft, and is no PeftModel"),
        (lambda: swap_moe(twice, heap), "experts can have one"),
    )
    refused = ("save_pretrained", "merge_and_unload", "disable_adapter", "add_adapter")
    for order in ORDERS:
        adapted = wrapped(small_model(), config_of("all-linear"), heap, order)
        calls = [partial(getattr(adapted, name), folder) for name in refused]
        assert_refused(*((call, "of peft knows nothing of adapters of experts") for call in calls))
        missing = partial(load_adapters, adapted, folder), "No such file"
        assert_refused(missing, error=symmoe.errors.CheckpointError)
    save_adapters(adapted, f"{folder}/saved")
    wrong = get_peft_model(swap_moe(small_model(), heap), config_of("target_parameters"))
    with pytest.raises(symmoe.errors.CheckpointError, match=r"has shape .* in the model"):
        load_adapters(wrong, f"{folder}/saved")
    assert not list(Path(folder).glob("*.partial"))
    attention = get_peft_model(
        swap_moe(small_model(), heap), peft.LoraConfig(target_modules=["q_proj"])
    )
    names = [name for name, param in attention.named_parameters() if param.requires_grad]
    assert len(names) == 4
    assert all("q_proj.lora_" in name for name in names)
    attention(ids).logits.sum().backward()


class Parts(torch.nn.Module):
    """Modules of symmoe in a user's model, which peft wraps."""

    def __init__(self, heap: symmoe.SymmetricHeap) -> None:
        super().__init__()
        torch.manual_seed(heap.rank)
        self.layer = symmoe.MoELayer(
            symmoe.MoEConfig(hidden=16, ffn=8, num_experts=4, top_k=2), heap
        )
        self.mlp = symmoe.GroupedMLP(2, 16, 8)
        self.linear = symmoe.GroupedLinear(2, 16, 16)

    def forward(self, x: torch.Tensor, part: str) -> torch.Tensor:
        return (
            self.layer(x)[0]
            if part == "layer"
            else getattr(self, part)(x, [2, 3], *[torch.ones(5)] * (part == "mlp"))
        )


@run_on(2)
def test_target_parameters_of_modules_of_symmoe(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap
) -> None:
    """peft's own get_peft_model, for modules whose forward runs, and for modules whose call kernels replace."""
    x = torch.ones(5, 16)
    for part, parameter, holder in (
        ("layer", "layer.experts.fc2.weight", "experts.fc2"),
        ("layer", "layer.router.weight", "router"),
        ("mlp", "mlp.fc1.weight", "fc1"),
    ):
        parts = Parts(heap)
        model = (
            peft.get_peft_model(parts, peft.LoraConfig(target_parameters=[parameter]))
            if rank == 0
            else parts
        )
        if rank == 0 or part == "layer":
            with pytest.raises(
                symmoe.errors.ArgumentError,
                match=f"{holder} has the forward of ParamWrapper.*Call symmoe.lora.add_lora",
            ):
                model(x, part)
        Parts(heap)(x, part)
    options = {"r": 4, "target_parameters": ["linear.weight"], "init_lora_weights": False}
    model = peft.get_peft_model(Parts(heap), peft.LoraConfig(**options))
    y = model(x, "linear")
    y.sum().backward()
    assert all(param.grad is not None for param in model.parameters() if param.requires_grad)
    linear = model.merge_and_unload().linear  # W + B A, made by peft
    bounds = zip(linear.weight, linear.bias, ((0, 2), (2, 5)), strict=True)
    torch.testing.assert_close(
        y, torch.cat([torch.nn.functional.linear(x[a:b], w, c) for w, c, (a, b) in bounds])
    )
