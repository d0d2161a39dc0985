"""What trainers are given in tests: a small transformers model, data that can be learnt, and what to do with them."""

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from hf_cases import VOCABULARY, random_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from transformers import TrainingArguments

import symmoe
from symmoe import checkpoint
from symmoe.integrations.transformers import Trainer

STEPS = 8
HALF = STEPS // 2
GLOBAL_BATCH = 4  # sequences of an optimizer step
LENGTH = 12
LEARNING_RATE = 1e-2
MAX_NORM = 0.3  # below all norms of these models, so that clipping counts


class Sequences(Dataset):
    """Sequences of LENGTH tokens, some of which are not predicted: another number in each."""

    def __init__(self, number: int, *, seed: int, all_labels: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._ids = torch.randint(0, VOCABULARY, (number, LENGTH), generator=generator)
        self._ids = (
            self._ids[:, :1] + torch.arange(LENGTH) * (1 + self._ids[:, 1:2] % 3)
        ) % VOCABULARY  # learnable
        self._labels = self._ids.clone()
        for row, labels in enumerate(self._labels):
            labels[: 0 if all_labels else row % 5] = -100

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._labels[index]}


def train_data() -> Sequences:
    return Sequences(STEPS * GLOBAL_BATCH // 2, seed=1)  # two epochs


def eval_data() -> Sequences:
    return Sequences(8, seed=2)


def small_model(**changes) -> nn.Module:
    """A model with equal weights on every rank."""
    return random_model("qwen3_moe", output_router_logits=False, **changes)


@dataclass
class Run:
    """The results of a loop: the mean loss over ranks and the norm of every step, and the loss on held-out data."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    heldout: float = 0.0


@dataclass(frozen=True)
class Job:
    """The work of a loop."""

    rank: int = 0  # where it runs
    num_ranks: int = 1  # where it runs
    accumulate: int = 1  # micro-batches of a step
    bf16: bool = False  # autocast to it
    lora: bool = False  # train only adapters of peft
    recomputes: bool = False  # the model's own switch for activation checkpointing is on
    folder: str = ""  # where it saves after half of the steps; "": nowhere
    resumes: bool = False  # go on from there
    max_norm: float = MAX_NORM  # of gradients; there are larger ones
    reduces: bool = False  # symmoe.reduce_gradients in place of DDP

    @property
    def batch_size(self) -> int:
        return GLOBAL_BATCH // self.num_ranks // self.accumulate

    def loader(self) -> DataLoader:
        """Micro-batches; the first of a run that resumes is the first that has not been trained on."""
        sequences = Sequences(STEPS * GLOBAL_BATCH, seed=1, all_labels=True)
        first = HALF * GLOBAL_BATCH if self.resumes else 0
        return DataLoader(
            [sequences[i] for i in range(first, len(sequences))], batch_size=self.batch_size
        )

    def mean(self, value: torch.Tensor) -> float:
        """Over ranks."""
        value = value.detach().float().clone()
        if self.num_ranks > 1:
            dist.all_reduce(value)
        return value.item() / self.num_ranks

    def heldout(self, model: nn.Module) -> float:
        sequences = Sequences(8, seed=2, all_labels=True)
        ids = torch.stack([sequences[i]["input_ids"] for i in range(self.rank, 8, self.num_ranks)])
        model.eval()
        with torch.no_grad():
            loss = self.mean(model(ids, labels=ids).loss)
        model.train()
        return loss

    def finish(self, run: Run, model: nn.Module) -> Run:
        """The run, which has noted the loss of every micro-batch, with that of every step, and on held-out data."""
        firsts = range(0, len(run.losses), self.accumulate)
        run.losses = [sum(run.losses[first : first + self.accumulate]) for first in firsts]
        run.heldout = self.heldout(model)
        return run


def with_torch(model: nn.Module, job: Job) -> Run:
    """The reference; and, with a DDP and symmoe's own functions in three places, the loop of one's own."""
    run = Run()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    plain = model
    if job.num_ranks > 1 and not job.reduces:
        model = DistributedDataParallel(model)

    def clip() -> torch.Tensor:
        if job.num_ranks == 1:
            return nn.utils.clip_grad_norm_(model.parameters(), job.max_norm)
        if job.reduces:
            symmoe.reduce_gradients(model)
        return symmoe.training.clip_grad_norm(model, job.max_norm)

    if job.resumes:
        checkpoint.load_checkpoint(job.folder, model=plain, optimizer=optimizer)
    micro_batches = [
        batch["input_ids"][job.rank :: job.num_ranks]
        for batch in Job(accumulate=job.accumulate, resumes=job.resumes).loader()
    ]
    for start in range(0, len(micro_batches), job.accumulate):
        for number, ids in enumerate(micro_batches[start : start + job.accumulate], 1):
            is_reduced = job.num_ranks == 1 or number == job.accumulate
            with nullcontext() if is_reduced else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=job.bf16):
                    loss = model(ids, labels=ids).loss / job.accumulate
                loss.backward()
            run.losses.append(job.mean(loss))
        run.norms.append(clip().item())
        optimizer.step()
        optimizer.zero_grad()
        if job.folder and not job.resumes and len(run.norms) == HALF:
            checkpoint.save_checkpoint(job.folder, HALF, model=plain, optimizer=optimizer)
    return job.finish(run, plain)


# -- transformers' Trainer --------------------------------------------------------------------------------------------
EVERY = 2
KEPT: dict = {
    "save_strategy": "steps",
    "eval_strategy": "steps",
    "save_steps": EVERY,
    "eval_steps": EVERY,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,  # the first one is the worst
}


def arguments(folder: str, num_ranks: int, **options) -> TrainingArguments:
    accumulate = options.get("gradient_accumulation_steps", 1)
    defaults = {
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": GLOBAL_BATCH // num_ranks // accumulate,
        "per_device_eval_batch_size": 4 // num_ranks,
        "learning_rate": LEARNING_RATE,
        "max_grad_norm": MAX_NORM,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(folder, **(defaults | options))


def trained(
    trainer_class: type, model, folder: str, num_ranks: int, *, since: int = 0, **options
) -> tuple[object, Run]:
    """A script that knows nothing of ranks, which goes on from the checkpoint of step `since`; and what it logs."""
    training_arguments = arguments(folder, num_ranks, **options)
    trainer = trainer_class(
        model, training_arguments, train_dataset=train_data(), eval_dataset=eval_data()
    )
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{since}" if since else None)
    logs = [
        entry for entry in trainer.state.log_history if "loss" in entry and entry["step"] > since
    ]
    return trainer, Run([entry["loss"] for entry in logs], [entry["grad_norm"] for entry in logs])


def resumed(model, folder: str, num_ranks: int, **options) -> list[float]:
    """Losses after the checkpoint in the middle, saving over those that are there."""
    options = {**KEPT, "load_best_model_at_end": False, **options}
    return trained(Trainer, model, folder, num_ranks, since=2 * EVERY, **options)[1].losses
