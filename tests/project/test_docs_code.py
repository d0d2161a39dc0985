"""Every Python block of README.md and docs/*.md runs, page by page, on as many ranks as the page is about.

Sybil finds the blocks and evaluates those of a page one after the other in one namespace. A block that cannot run here
has `<!-- skip: next "the reason" -->` before it.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import SkipTest
from unittest.mock import Mock, call, patch

import pytest

pytest.importorskip("sybil")

import torch
import torch.distributed as dist
from cluster import Cluster
from packaging.requirements import Requirement
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

import symmoe

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 4

Scope = dict[str, Any]


@dataclass(frozen=True)
class Page:
    """How a page runs.

    Attributes:
        num_ranks: that it runs on. One rank has no process group.
        prepare: puts into the namespace what the page takes for granted.
        replaced: what is written differently for these sizes and for CPUs.
        check: what must hold afterwards; also closes what the page leaves open.
        needs: packages, as pip would be given them.
    """

    num_ranks: int = 1
    prepare: Callable[[Scope], None] = lambda scope: None
    replaced: tuple[tuple[str, str], ...] = ()
    check: Callable[[Scope], None] = lambda scope: None
    needs: tuple[str, ...] = ()


# -- what pages take for granted --------------------------------------------------------------------------------------


def close_heap(scope: Scope) -> None:
    scope["heap"].close()


def readme_results(scope: Scope) -> None:
    assert scope["moe"].router.weight.grad.isfinite().all()
    assert scope["metrics"].expert_load.sum() == 2 * 256 * 4  # ranks, tokens, top-k
    routers, experts = (
        alike_on_ranks(weight) for weight in (scope["moe"].router.weight, scope["moe"].experts.fc1.weight)
    )
    assert (routers, experts) == (True, False)


def alike_on_ranks(weight: torch.Tensor) -> bool:
    gathered = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, weight.detach())
    return all(torch.equal(each, gathered[0]) for each in gathered)


def own_buffer(scope: Scope) -> None:
    assert scope["y"].data_ptr() == scope["out"].data_ptr()


def training_run(scope: Scope) -> None:
    assert scope["loss"].item() < 0.5
    assert scope["metrics"].expert_load.sum() == 1024


def counted_features(scope: Scope) -> None:
    assert sum(scope["record"].tokens_per_expert) == 40 * 2


def replicated_gradients(scope: Scope) -> None:
    assert all(p.grad.abs().sum() > 0 for p in scope["moe"].parameters())


def model_to_save(scope: Scope) -> None:
    heap = symmoe.SymmetricHeap(num_bytes=4 << 20, backend="host")
    model = symmoe.MoELayer(symmoe.MoEConfig(hidden=32, ffn=16, num_experts=8, top_k=2), heap)
    symmoe.broadcast_parameters(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 32))[0].sum().backward()
    symmoe.reduce_gradients(model)
    optimizer.step()
    scope.update(heap=heap, model=model, optimizer=optimizer, step=40, tokens_seen=4096)


def loaded_state(scope: Scope) -> None:
    assert (scope["start"], scope["tokens_seen"]) == (40, 4096)
    assert scope["done"].rank_extra is not None
    close_heap(scope)


def sharded_training(scope: Scope) -> None:
    from small_model import FEATURES, Model
    from torch.distributed.checkpoint.state_dict import get_state_dict

    scope.update(W=dist.get_world_size(), ep=2, Model=Model, torch=torch, symmoe=symmoe, functools=functools)
    scope.update(get_state_dict=get_state_dict, folder="dcp", x=torch.randn(6, FEATURES, requires_grad=True))
    scope["block"] = lambda x: scope["model"](x)[0]


def sharded_results(scope: Scope) -> None:
    assert scope["flops"] > 0
    assert "symmoe.moe_backward" in map(str, scope["counter"].get_flop_counts()["Global"])
    scope["x"].grad = None
    scope["y"].sum().backward()
    assert scope["x"].grad.abs().sum() > 0
    assert Path("dcp", ".metadata").is_file()
    close_heap(scope)


def megatron_program(scope: Scope) -> None:
    from megatron_cases import batch_of, config_of, use_groups

    use_groups(ep=2)
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = config_of(num_layers=2)
    scope.update(config=config, num_moe_layers_here=2, batch=batch_of())
    scope.update(get_gpt_layer_local_spec=get_gpt_layer_local_spec, GPTModel=GPTModel)


def megatron_results(scope: Scope) -> None:
    from megatron.core import parallel_state

    from symmoe.integrations.megatron import SymmExperts

    assert any(isinstance(module, SymmExperts) for module in scope["model"].modules())
    assert scope["model"].decoder.layers[0].mlp.router.weight.grad.abs().sum() > 0
    parallel_state.destroy_model_parallel()


def make_checkpoint(folder: str, write: Callable[[str], object]) -> int:
    """The rank. Returns when rank 0 has written the folder."""
    rank, deadline_s = int(os.environ["RANK"]), time.monotonic() + 60
    if rank == 0:
        write("unfinished")
        os.rename("unfinished", folder)
    while not Path(folder).is_dir():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return rank


def published_checkpoint(scope: Scope) -> None:
    from hf_cases import batch_of, random_model

    rank = make_checkpoint("Qwen3-30B-A3B", random_model("qwen3_moe").save_pretrained)
    scope["my_share_of_the_data"] = [batch_of(rank), batch_of(rank + 4)]


def tuned_model(scope: Scope) -> None:
    before, after = (Path(folder, "model.safetensors").read_bytes() for folder in ("Qwen3-30B-A3B", "tuned"))
    assert len(before) == len(after)
    assert before != after
    batch = scope["batch"]
    assert scope["model"](batch, labels=batch).loss.isfinite()
    close_heap(scope)


def downloaded_checkpoint(scope: Scope) -> None:
    from hf_cases import VOCABULARY, random_model
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"word{number}" for number in range(VOCABULARY)]

    def write(folder: str) -> None:
        random_model("olmoe", pad_token_id=None, eos_token_id=None).save_pretrained(folder)
        tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
        Path("my.txt").write_text(" ".join(words[number % 7] for number in range(400)), encoding="utf-8")

    make_checkpoint("OLMoE-1B-7B", write)


def finetuned(scope: Scope) -> None:
    """It has learned to count to seven, and the plain model has it."""
    assert scope["loss"].item() < 1.0
    if scope["rank"] == 0:
        batch, answer = scope["batch"], scope["answer"][0].tolist()
        with torch.no_grad():
            loss = scope["plain"](batch, labels=batch).loss
        assert loss.item() == pytest.approx(scope["loss"].item(), abs=0.5)
        assert answer == [(answer[0] + number) % 7 for number in range(12)]


def tuning_data(scope: Scope) -> None:
    """A checkpoint, and data of the Trainer's kind."""
    published_checkpoint(scope)
    from trainer_cases import Sequences

    rank = int(os.environ["RANK"])
    scope.update(train_data=Sequences(16, seed=1), eval_data=Sequences(4, seed=2))
    scope["prompts"] = Sequences(2, seed=3)[rank]["input_ids"][None, : 3 + rank]


def tuned_by_trainer(scope: Scope) -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    assert scope["trainer"].state.global_step == 4
    assert scope["tokens"].shape[1] <= scope["prompts"].shape[1] + 4
    for folder in ("tuned", "runs/tuning/checkpoint-2", "runs/tuning/checkpoint-4"):
        assert Path(folder, "model.safetensors").is_file()
    assert Path("runs/tuning/checkpoint-4/optimizer/latest").is_file()


def own_loop(scope: Scope) -> None:
    from small_model import FEATURES, Model
    from torch.utils.data import DataLoader

    def build_model(heap: symmoe.SymmetricHeap) -> torch.nn.Module:
        model = Model(heap)
        symmoe.broadcast_parameters(model)
        return model

    data = [(torch.randn(FEATURES), torch.randn(FEATURES)) for _ in range(32)]
    scope.update(build_model=build_model, loader=DataLoader(data, batch_size=4))


def accelerated_loop(scope: Scope) -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    assert Path("runs/half/model_and_optimizer/latest").is_file()
    assert scope["optimizer"].optimizer.state


def ddp_loop(scope: Scope) -> None:
    assert Path("runs/ddp/latest").is_file()
    assert len(scope["optimizer"].state) == len(list(scope["model"].parameters()))


def lightning_program(scope: Scope) -> None:
    import lightning
    from lightning.fabric import Fabric

    own_loop(scope)

    class Module(lightning.LightningModule):
        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
            return (self.model(batch[0])[0] - batch[1]).square().mean()

        validation_step = training_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Made(Module):
        """Lightning makes its module where the page says so: when there is a heap."""

        def __init__(self) -> None:
            super().__init__()
            self.model = scope["build_model"](scope["heap"])

    scope.update(lightning=lightning, Fabric=Fabric, Made=Made)


def lightning_results(scope: Scope) -> None:
    assert Path("runs/fabric.ckpt/latest").is_file()
    assert Path("runs/module.ckpt/latest").is_file()
    assert scope["trainer"].global_step == 2


def titan_program(scope: Scope) -> None:
    from torchtitan_cases import small

    scope.update(small=small)


def titan_results(scope: Scope) -> None:
    from torchtitan_cases import dispatcher_of

    from symmoe.integrations.torchtitan import SymmoeTokenDispatcher

    losses = scope["trainer"].metrics_processor.run.losses
    assert losses[-1] < 0.9 * losses[0]
    dispatcher = dispatcher_of(scope["trainer"])
    assert isinstance(dispatcher, SymmoeTokenDispatcher)
    assert dispatcher.ep_mesh.size() == 2
    dispatcher.close()


def saved_adapters(scope: Scope) -> None:
    assert {path.name for path in Path("adapters").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def quantised_rows(scope: Scope) -> None:
    scope["rows"], scope["row_start"] = torch.randn(48, 64), torch.tensor([0, 20, 48], dtype=torch.int32)
    scope["weight"] = torch.randn(2, 96, 64)


def near_the_rows(scope: Scope) -> None:
    assert (scope["about"] - scope["rows"]).abs().max() < 0.07 * scope["rows"].abs().max()


def loggers(scope: Scope) -> None:
    sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=Mock())
    sys.modules["wandb"] = types.SimpleNamespace(init=Mock())


def recorded(scope: Scope) -> None:
    assert all(Path(name).stat().st_size for name in ("step.json", "step.txt", "load.jsonl"))
    scope["sink"]({"moe/drops": 0.0}, 3)
    assert sys.modules["wandb"].init.return_value.mock_calls == [call.log({"moe/drops": 0.0}, 3)]
    assert sys.modules["torch.utils.tensorboard"].SummaryWriter.mock_calls[0] == call("runs/moe")
    del sys.modules["torch.utils.tensorboard"], sys.modules["wandb"]


PAGES = {
    "README.md": Page(2, check=readme_results),
    "docs/start.md": Page(2, check=training_run),
    "docs/concepts.md": Page(check=own_buffer),
    "docs/torchrun.md": Page(4, check=replicated_gradients),
    "docs/tuning.md": Page(),
    "docs/training.md": Page(check=counted_features),
    "docs/checkpoints.md": Page(2, model_to_save, check=loaded_state, needs=("safetensors",)),
    "docs/fsdp.md": Page(
        4,
        sharded_training,
        replaced=(('init_device_mesh("cuda"', 'init_device_mesh("cpu"'), ("num_bytes=...", "num_bytes=4 << 20")),
        check=sharded_results,
    ),
    "docs/transformers.md": Page(
        4, published_checkpoint, check=tuned_model, needs=("transformers>=5.23", "accelerate", "safetensors")
    ),
    "docs/finetune.md": Page(
        2,
        downloaded_checkpoint,
        replaced=(('"OLMoE-1B-7B", 512, 4', '"OLMoE-1B-7B", 16, 4'), ("lr=1e-5", "lr=1e-2"), ("(1, 101)", "(1, 31)")),
        check=finetuned,
        needs=("transformers>=5.17", "safetensors"),
    ),
    "docs/hf_trainer.md": Page(
        2,
        tuning_data,
        replaced=(
            ('    "runs/tuning",', '    "runs/tuning",\n    use_cpu=True,\n    report_to=[],\n    disable_tqdm=True,'),
        ),
        check=tuned_by_trainer,
        needs=("transformers>=5.23", "accelerate", "safetensors"),
    ),
    "docs/accelerate.md": Page(
        2,
        own_loop,
        replaced=(("Accelerator(mixed", "Accelerator(cpu=True, mixed"),),
        check=accelerated_loop,
        needs=("accelerate", "safetensors"),
    ),
    "docs/ddp.md": Page(2, own_loop, check=ddp_loop, needs=("safetensors",)),
    "docs/lightning.md": Page(
        2,
        lightning_program,
        replaced=(
            ('accelerator="auto"', 'accelerator="cpu"'),
            ("    strategy=TrainerStrategy(),", '    accelerator="cpu",\n    strategy=TrainerStrategy(),'),
            ("trainer.fit(module", "module = Made()\ntrainer.fit(module"),
        ),
        check=lightning_results,
        needs=("lightning>=2.6", "safetensors"),
    ),
    "docs/peft.md": Page(
        2, published_checkpoint, check=saved_adapters, needs=("transformers>=5.23", "peft>=0.21", "safetensors")
    ),
    "docs/torchtitan.md": Page(
        2,
        titan_program,
        replaced=(
            ("= qwen3_moe_debug()", "= small(qwen3_moe_debug())"),
            ('sizes = {"hidden_dim": 256', 'sizes = {"hidden_dim": 64'),
            ("4 * 4096", "4 * 16"),
        ),
        check=titan_results,
        needs=("torchtitan==0.3.0", "torchdata", "spmd_types", "tyro", "datasets"),
    ),
    "docs/precision.md": Page(1, quantised_rows, check=near_the_rows),
    "docs/timeline.md": Page(1, loggers, check=recorded, needs=("matplotlib",)),
    # The last one: without a GPU, Megatron needs stand-ins in torch.cuda that others cannot bear.
    "docs/megatron.md": Page(
        2,
        megatron_program,
        replaced=(
            ("GPTModel(config, spec, ...)", "GPTModel(config, spec, 64, 12)"),
            ("\n...\nheap.close()", "\nmodel(**batch).mean().backward()\nheap.close()"),
        ),
        check=megatron_results,
        needs=("megatron-core",),
    ),
}


# -- running ----------------------------------------------------------------------------------------------------------


def parse(path: Path, page: Page) -> Document:
    """The page with its blocks."""
    text = path.read_text(encoding="utf-8")
    for written, here in page.replaced:
        assert text.count(written) == 1, written
        text = text.replace(written, here)
    document = Document(text, str(path))
    for parser in (PythonCodeBlockParser(), SkipParser()):
        for region in parser(document):
            document.add(region)
    return document


def run_page(rank: int, num_ranks: int, path: str, page: str | None, folder: str, port: int) -> list[str]:
    """Runs a page on its ranks. Returns the reasons of what was skipped."""
    if dist.is_initialized():
        dist.destroy_process_group()
    how = Page() if page is None else PAGES[page]
    if rank >= how.num_ranks:
        return []
    sys.path[:0] = [str(ROOT / "tests" / "support")]
    document, skipped = parse(Path(path), how), []
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": how.num_ranks, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in where.items()}, MASTER_PORT=str(port))
    torch.manual_seed(rank)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        if how.num_ranks > 1 and "init_process_group" not in document.text:
            dist.init_process_group("gloo")
        how.prepare(document.namespace)
        for example in document.examples():
            try:
                example.evaluate()
            except SkipTest as reason:
                skipped.append(str(reason))
        how.check(document.namespace)
    if dist.is_initialized():
        dist.destroy_process_group()
    return skipped


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[], Cluster]]:
    """Ranks of this module's own, whose process groups come and go with the pages."""
    started: list[Cluster] = []

    def get() -> Cluster:
        if not started or not started[-1].alive:
            started.append(Cluster(NUM_RANKS))
        return started[-1]

    yield get
    for cluster in started:
        cluster.close()


def is_installed(requirement: Requirement) -> bool:
    try:
        return version(requirement.name) in requirement.specifier
    except PackageNotFoundError:
        return False


@pytest.mark.parametrize("page", PAGES)
def test_page_runs(ranks, page: str, tmp_path: Path):
    for need in PAGES[page].needs:
        if not is_installed(Requirement(need)):
            pytest.skip(f"{page} needs {need}, which is not installed")
    skipped = ranks().run(run_page, str(ROOT / page), page, str(tmp_path), free_port())
    assert all(len(reason) > 20 for reasons in skipped for reason in reasons)


# -- that nothing is left out -----------------------------------------------------------------------------------------


def pages_with_code() -> dict[str, int]:
    """Number of Python blocks of every page that has any."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    counts = {
        p.relative_to(ROOT).as_posix(): len(re.findall(r"^```(?:python|py)\b", p.read_text(), re.M)) for p in paths
    }
    return {page: count for page, count in counts.items() if count}


def test_every_block_of_every_page_is_found():
    assert pages_with_code().keys() == PAGES.keys()
    for page, count in pages_with_code().items():
        found = [example for example in parse(ROOT / page, Page()).examples() if hasattr(example.parsed, "splitlines")]
        assert len(found) == count, page


@pytest.mark.parametrize(
    ("block", "error"), [("assert 1 == 2", AssertionError), ("symmoe.no_such_name", AttributeError)]
)
def test_a_wrong_block_fails(block: str, error: type[Exception], tmp_path: Path):
    """Negative control."""
    path = tmp_path / "page.md"
    path.write_text(f"```python\nimport symmoe\n```\n\n```python\n{block}\n```\n")
    with patch.dict(os.environ), patch.object(sys, "path", [*sys.path]), pytest.raises(error):
        run_page(0, 1, str(path), None, str(tmp_path), 0)
