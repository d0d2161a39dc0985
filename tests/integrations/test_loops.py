"""Usual loops with accelerate, plain DDP, and Lightning's Fabric and Trainer: two ranks against one process that trains
the unmodified model with torch only."""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.17")

import torch
import trainer_cases as cases
import transformers
from cluster import run_on
from launchers import launched
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from worker import assert_refused

import symmoe
from symmoe.integrations.transformers import save_checkpoint, swap_moe

BOUND = 1e-6  # of losses, relative


def with_accelerate(model: nn.Module, job: cases.Job) -> cases.Run:
    from symmoe.integrations.accelerate import Accelerator  # the one word

    run = cases.Run()
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if job.bf16 else "no",
        gradient_accumulation_steps=job.accumulate,
        rng_types=[],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=cases.LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, job.loader()
    )
    if job.resumes:
        accelerator.load_state(job.folder)
    for micro_batch in loader:
        with accelerator.accumulate(model):
            ids = micro_batch["input_ids"]
            loss = model(ids, labels=ids).loss
            accelerator.backward(loss)
            run.losses.append(job.mean(loss) / job.accumulate)
            if accelerator.sync_gradients:
                run.norms.append(
                    accelerator.clip_grad_norm_(model.parameters(), cases.MAX_NORM).item()
                )
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if (
            job.folder
            and not job.resumes
            and accelerator.sync_gradients
            and len(run.norms) == cases.HALF
        ):
            accelerator.save_state(job.folder)
    return job.finish(run, accelerator.unwrap_model(model))


def with_fabric(model: nn.Module, job: cases.Job) -> cases.Run:
    from lightning.fabric import Fabric

    from symmoe.integrations.lightning import FabricStrategy

    run = cases.Run()
    fabric = Fabric(
        accelerator="cpu",
        devices=job.num_ranks,
        strategy=FabricStrategy(),  # the one word
        precision="bf16-mixed" if job.bf16 else "32-true",
    )
    fabric.launch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cases.LEARNING_RATE)
    plain = model
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(job.loader())
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if job.resumes:
        fabric.load(job.folder, state)
        assert state["step"] == cases.HALF
    for number, micro_batch in enumerate(loader, 1):
        ids = micro_batch["input_ids"]
        is_last = number % job.accumulate == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = model(ids, labels=ids).loss / job.accumulate
            fabric.backward(loss)
        run.losses.append(job.mean(loss))
        if is_last:
            run.norms.append(
                fabric.clip_gradients(model, optimizer, max_norm=cases.MAX_NORM).item()
            )
            optimizer.step()
            optimizer.zero_grad()
            if job.folder and not job.resumes and len(run.norms) == cases.HALF:
                fabric.save(job.folder, state | {"step": cases.HALF})
    return job.finish(run, plain)


def with_lightning(model: nn.Module, job: cases.Job) -> cases.Run:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    from symmoe.integrations.lightning import TrainerStrategy

    run = cases.Run()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, micro_batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            ids = micro_batch["input_ids"]
            loss = self.model(ids, labels=ids).loss
            run.losses.append(job.mean(loss) / job.accumulate)
            return loss

        def train_dataloader(self) -> DataLoader:
            """An epoch is half of the data: Lightning does not skip batches of the epoch in which a run resumes."""
            first = self.global_step * cases.GLOBAL_BATCH
            data = cases.Job().loader().dataset[first : first + cases.HALF * cases.GLOBAL_BATCH]
            in_order = DistributedSampler(
                data, job.num_ranks, job.rank, shuffle=False
            )  # Lightning's own shuffles
            return DataLoader(data, batch_size=job.batch_size, sampler=in_order)

        def validation_step(self, micro_batch: dict[str, torch.Tensor], number: int) -> None:
            ids = micro_batch["input_ids"]
            self.log("heldout", self.model(ids, labels=ids).loss, sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=cases.LEARNING_RATE)

    folder = Path(job.folder or ".")
    saves = bool(job.folder) and not job.resumes
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=job.num_ranks,
        strategy=TrainerStrategy(),  # the one word
        precision="bf16-mixed" if job.bf16 else "32-true",
        max_steps=cases.STEPS,
        reload_dataloaders_every_n_epochs=1,
        accumulate_grad_batches=job.accumulate,
        gradient_clip_val=cases.MAX_NORM,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        enable_checkpointing=saves,
        callbacks=[ModelCheckpoint(folder, "{step}", save_top_k=-1)] * saves,
    )
    module = Module()
    trainer.fit(module, ckpt_path=folder / f"step={cases.HALF}.ckpt" if job.resumes else None)
    run = job.finish(run, model)
    heldout = cases.Sequences(8, seed=2, all_labels=True)
    (evaluation,) = trainer.validate(
        module, DataLoader(heldout, batch_size=8 // job.num_ranks), verbose=False
    )
    run.heldout = evaluation["heldout"]
    return run


LOOPS: dict[str, Callable[[nn.Module, cases.Job], cases.Run]] = {
    "DDP": cases.with_torch,
    "accelerate": with_accelerate,
    "Fabric": with_fabric,
    "Lightning": with_lightning,
}
OPTIONS: dict[str, dict] = {
    "plain": {},
    "bf16": {"bf16": True},
    "LoRA": {"lora": True},
    "recomputed": {"recomputes": True},
    "accumulate": {"accumulate": 2},
}


@functools.cache
def reference(options: str) -> cases.Run:
    job = cases.Job(**OPTIONS[options])
    model = cases.small_model()
    if job.lora:
        import peft

        torch.manual_seed(7)
        model = peft.get_peft_model(model, adapters())
    return cases.with_torch(model, job)


def adapters():
    import peft

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return peft.LoraConfig(r=4, lora_alpha=64, target_parameters=names, target_modules=["q_proj"])


def swapped(heap: symmoe.SymmetricHeap, job: cases.Job, *, seed: int = 0):
    model = swap_moe(cases.small_model(seed=seed), heap)
    if job.recomputes:
        model.train().gradient_checkpointing_enable()
    if job.lora:
        from symmoe.integrations.peft import get_peft_model

        torch.manual_seed(7 + seed)
        return get_peft_model(model, adapters())
    return model


def on_ranks(
    rank: int, num_ranks: int, loop: str, options: dict, folder: str
) -> tuple[cases.Run, cases.Run]:
    """A run that saves, and a run of another model that resumes from that checkpoint."""
    with launched(rank, num_ranks), symmoe.SymmetricHeap(num_bytes=4 << 20) as heap:
        job = cases.Job(rank, num_ranks, folder=f"{folder}/half", **options)
        model, calls = swapped(heap, job), []
        if job.recomputes:
            model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(None))
        uninterrupted = LOOPS[loop](model, job)
        assert not job.recomputes or len(calls) >= 2 * cases.STEPS, len(calls)
        if not job.lora:
            save_checkpoint(model, f"{folder}/tuned")
    with launched(rank, num_ranks), symmoe.SymmetricHeap(num_bytes=4 << 20) as heap:
        return uninterrupted, LOOPS[loop](
            swapped(heap, job, seed=9), cases.Job(**{**vars(job), "resumes": True})
        )


FAST = [("accelerate", "accumulate"), ("Lightning", "accumulate")]
CASES = [
    pytest.param(
        loop,
        options,
        marks=[] if (loop, options) in FAST else pytest.mark.slow,
        id=f"{loop}-{options}",
    )
    for options in OPTIONS
    for loop in LOOPS
]


@pytest.mark.parametrize(("function", "options"), CASES)
def test_two_ranks_train_as_one_process(cluster, tmp_path: Path, function: str, options: str):
    """Losses, norms and evaluation are those of one process; a resumed run has the bits of an uninterrupted one; and
    the checkpoint for transformers has the trained weights."""
    package = {"DDP": "torch", "accelerate": "accelerate"}.get(function, "lightning")
    if find_spec(package) is None:
        pytest.skip(f"needs {package}, which is not installed")
    if options == "LoRA":
        pytest.importorskip("peft", minversion="0.21")
    expected = reference(options)
    rounded = options == "bf16"
    for run, results in cluster(2).run(on_ranks, function, OPTIONS[options], str(tmp_path)):
        assert len(run.losses) == cases.STEPS
        assert run.losses == pytest.approx(expected.losses, rel=5e-3 if rounded else BOUND)
        norms = [] if function == "Lightning" else expected.norms  # which does not tell them
        assert run.norms == pytest.approx(norms, rel=8e-2 if rounded else 2 * BOUND)
        assert run.heldout == pytest.approx(expected.heldout, rel=5e-3 if rounded else BOUND)
        if (function, options) != (
            "Lightning",
            "accumulate",
        ):  # Lightning itself steps after one micro-batch there
            assert (results.losses, results.norms) == (
                run.losses[cases.HALF :],
                run.norms[cases.HALF :],
            )
    assert expected.losses[-1] < 0.95 * expected.losses[0]
    assert max(expected.norms) > cases.MAX_NORM
    if options == "LoRA":
        return  # tests/integrations/test_peft.py
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert cases.Job().heldout(tuned) == pytest.approx(
        expected.heldout, rel=5e-3 if rounded else BOUND
    )


# -- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")
@run_on(2)
def test_accelerate_refuses(rank: int, num_ranks: int, tmp_path: Path) -> None:
    from symmoe.integrations.accelerate import Accelerator

    with launched(rank, num_ranks), symmoe.SymmetricHeap(num_bytes=4 << 20) as heap:
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(swap_moe(cases.small_model(), heap))
        assert_refused(
            (
                lambda: accelerator.clip_grad_norm_(list(model.parameters())[1:], 1.0),
                "all of a prepared model",
            ),
            (
                lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1),
                r"norm_type .1. must be 2",
            ),
            (lambda: accelerator.get_state_dict(model), "only this rank's experts"),
            (lambda: accelerator.save_model(model, tmp_path), "only this rank's experts"),
            (lambda: accelerator.load_state(), r"input_dir .None. must be"),
        )
        accelerator.prepare(swap_moe(cases.small_model(), heap))
        with pytest.raises(
            symmoe.errors.ArgumentError, match="prepared are 2 models and 0 optimizers"
        ):
            accelerator.save_state(str(tmp_path))
    with (
        launched(rank, num_ranks),
        pytest.raises(symmoe.errors.ArgumentError, match=r"mixed_precision .'fp16'. must be"),
    ):
        accelerator = Accelerator(cpu=True, mixed_precision="fp16")


@pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")
@run_on(2)
def test_lightning_refuses(
    rank: int, num_ranks: int, trainer_heap: symmoe.SymmetricHeap, tmp_path: Path
) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    from symmoe.integrations.lightning import FabricStrategy

    fabric = Fabric(accelerator="cpu", devices=num_ranks, strategy=FabricStrategy())
    fabric.launch()
    plain = swap_moe(cases.small_model(), trainer_heap)
    optimizers = [torch.optim.SGD(plain.parameters(), lr=0.1) for _ in range(2)]
    model, *optimizers = fabric.setup(plain, *optimizers)
    state = {"model": model, "one": optimizers[0], "other": optimizers[1]}
    assert_refused(
        (lambda: fabric.setup(nn.Linear(2, 2)), "has no MoELayer"),
        (lambda: fabric.save(tmp_path, state), "there are 2 optimizers"),
        (
            lambda: fabric.save(tmp_path, {"model": model}, filter={"model": lambda *_: True}),
            "is saved whole",
        ),
        (
            lambda: fabric.save(tmp_path, {"model": model, "ema": {"of": plain.state_dict()}}),
            r"state\.ema\.of has this rank's experts",
        ),
        (lambda: fabric.load(tmp_path), r"state .NoneType. must be a dict"),
        (
            lambda: fabric.clip_gradients(model, optimizers[0], max_norm=1.0, norm_type=1),
            "must be 2",
        ),
    )
    fabric = Fabric(
        accelerator="cpu",
        devices=num_ranks,
        strategy=FabricStrategy(precision=MixedPrecision("16-mixed", "cpu")),
    )
    fabric.launch()
    with pytest.raises(symmoe.errors.ArgumentError, match=r"precision .'16-mixed'. must be"):
        fabric.setup(plain)
