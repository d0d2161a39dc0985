"""All models of the installed transformers whose experts use its experts interface. A swapped model computes, saves and
loads as the unmodified one; or it is refused, and the text names the missing feature.

The list comes from transformers, so tests cover models that a new version adds: each passes, or is listed as refused
below."""

import copy
from pathlib import Path

import pytest
from cluster import run_on

pytest.importorskip("transformers", minversion="5.17")

import torch
import transformers
from hf_cases import error, share_of
from hf_models import VOCABULARY, experts_code, module_names, tiny_model
from safetensors.torch import load_file, save_file

import symmoe
from symmoe.integrations.transformers import from_pretrained, save_checkpoint, swap_moe

BOUND = 1e-4  # measured: up to 3e-5, where gradients cancel
REFUSED = {
    "inkling2": "Inkling2SoftcappedSwiGLU",
    "inkling2_loop": "Inkling2LoopSoftcappedSwiGLU",
    "muse_spark": "post_expert_norm",
}


def tokens(rank: int) -> torch.Tensor:
    return torch.randint(
        0, VOCABULARY, (2, 7 + rank), generator=torch.Generator().manual_seed(rank)
    )


def output(model: torch.nn.Module, rank: int) -> torch.Tensor:
    return model(tokens(rank), use_cache=False)[0]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        key: torch.zeros_like(p) if p.grad is None else p.grad
        for key, p in model.named_parameters()
    }


def check(heap: symmoe.SymmetricHeap, name: str, folder: Path) -> None:
    """Checks outputs, all gradients, files, and generated tokens."""
    reference, rank, num_ranks = tiny_model(name), heap.rank, heap.num_ranks
    model = swap_moe(copy.deepcopy(reference), heap)
    for peer in range(num_ranks):
        (output(reference, peer).square().mean() / num_ranks).backward()
    y = output(model, rank)
    y.square().mean().backward()
    symmoe.reduce_gradients(model)
    expected = output(reference, rank)
    assert error(y.detach(), expected.detach()) < BOUND
    actual, full_gradients = map(gradients, (model, reference))
    expected = share_of(full_gradients, rank, num_ranks, name)
    assert actual.keys() == expected.keys()
    assert max(error(actual[key], expected[key]) for key in actual) < BOUND
    assert len(actual.keys() - full_gradients.keys()) >= 2
    save_checkpoint(model, folder / "ours")
    loaded = from_pretrained(
        folder / "ours", heap, config=reference.config, model_class=type(model)
    )
    assert torch.equal(output(loaded, rank), y)
    assert gradients(loaded).keys() == actual.keys()  # those that are tied are one
    save_checkpoint(loaded, folder / "again", like=folder / "ours")
    if rank == 0:
        reference.save_pretrained(folder / "theirs")
        files = {
            (folder / folder_name / "model.safetensors").read_bytes()
            for folder_name in ("ours", "theirs", "again")
        }
        assert len(files) == 1
    if num_ranks > 1 and model.can_generate():
        options = {
            "do_sample": False,
            "max_new_tokens": 2 + rank,
            "pad_token_id": 0,
            "eos_token_id": None,
        }
        generated = loaded.generate(tokens(rank), synced_gpus=True, **options)
        assert torch.equal(generated, reference.generate(tokens(rank), **options))


# No gate, transposed weights, experts beside an MLP, a clamp, biases.
TWO_RANKS = ["nemotron_h", "aria", "gemma4", "deepseek_v4", "openai_privacy_filter"]
# Other names of blocks, linear attention.
MORE_ON_TWO_RANKS = ["granitemoe", "lfm2_moe", "qwen3_next"]
CODES = list(experts_code().values())


@pytest.mark.parametrize(
    "model_type",
    [
        # Slow: what has the experts' code of a model before it, and what runs on two ranks.
        pytest.param(
            name,
            marks=[pytest.mark.slow] * (name in TWO_RANKS or CODES.index(code) < number),
        )
        for number, (name, code) in enumerate(experts_code().items())
    ],
)
def test_a_model_equals_the_unmodified_one_or_is_refused(
    model_type: str, heap: symmoe.SymmetricHeap, tmp_path: Path
):
    if model_type in REFUSED:
        with pytest.raises(symmoe.errors.ArgumentError, match=REFUSED[model_type]):
            swap_moe(tiny_model(model_type), heap)
    else:
        check(heap, model_type, tmp_path)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v4", "deepseek_v32", "gpt_oss"])
def test_dtypes_are_those_of_transformers(
    model_type: str, heap: symmoe.SymmetricHeap, tmp_path: Path
):
    """Modules, tensors or patterns name the parameters that stay in fp32, and with fp16 more than with bf16."""
    reference = tiny_model(model_type)
    dtype = torch.bfloat16 if model_type == "deepseek_v3" else torch.float16
    reference.save_pretrained(tmp_path)
    stock_state = type(reference).from_pretrained(tmp_path, dtype=dtype).state_dict()
    model = from_pretrained(tmp_path, heap, dtype=dtype, model_class=type(reference))
    expected = share_of(stock_state, 0, 1, model_type)
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == {
        n: t.dtype for n, t in expected.items()
    }
    fp32_names = {name for name, tensor in stock_state.items() if tensor.dtype == torch.float32}
    assert fp32_names
    save_checkpoint(model, tmp_path / "ours", like=tmp_path)
    was, now = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "ours"))
    rounded = {
        key
        for key, tensor in was.items()
        if torch.equal(now[key], tensor.to(dtype).to(tensor.dtype))
    }
    exact = {key for key, tensor in was.items() if torch.equal(now[key], tensor)}
    assert rounded | exact == was.keys() > exact >= fp32_names & was.keys()


def test_numbers_on_the_page():
    num_models = len(module_names())
    refused = len(set(REFUSED) & set(module_names()))
    assert num_models - refused > 30
    if transformers.__version__ == "5.24.0":
        page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
        assert f"{num_models - refused} of the {num_models} modules of transformers 5.24" in page


@pytest.mark.parametrize(
    "model_types", [TWO_RANKS, pytest.param(MORE_ON_TWO_RANKS, marks=pytest.mark.slow)], ids=str
)
@run_on(2)
def test_on_two_ranks(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap, tmp_path: Path, model_types: list[str]
) -> None:
    for name in sorted(set(model_types) & set(module_names())):
        check(heap, name, tmp_path / name)


@pytest.mark.parametrize(
    "model_type", ["ernie4_5_vl_moe", "gemma4", "glm4v_moe", "qwen3_5_moe", "qwen3_vl_moe"]
)
def test_files_of_models_with_images(model_type: str, heap: symmoe.SymmetricHeap, tmp_path: Path):
    """Keys have other prefixes, and there are experts for images (ERNIE) or other shapes on disk (Qwen3-VL)."""
    reference = tiny_model(model_type, with_images=True)
    model = swap_moe(copy.deepcopy(reference), heap)
    reference.save_pretrained(tmp_path / "theirs")
    save_checkpoint(model, tmp_path / "ours")
    files = [tmp_path / folder_name / "model.safetensors" for folder_name in ("ours", "theirs")]
    assert files[0].read_bytes() == files[1].read_bytes()
    if model_type == "qwen3_vl_moe":  # as on the hub
        turned = {
            key: t.mT.contiguous() if ".experts." in key else t
            for key, t in load_file(files[0]).items()
        }
        save_file(turned, files[0], metadata={"format": "pt"})
        stock_state = type(reference).from_pretrained(tmp_path / "ours").state_dict()
        assert all(
            torch.equal(stock_state[key], tensor) for key, tensor in reference.state_dict().items()
        )
    want = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    loaded = from_pretrained(tmp_path / "ours", heap, model_class=type(model))
    assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in want.items())
    assert gradients(loaded).keys() == gradients(model).keys()
    before = files[0].read_bytes()
    save_checkpoint(loaded, tmp_path / "again", like=tmp_path / "ours")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == before
