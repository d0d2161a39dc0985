"""transformers' Trainer for swapped models.

Four methods of a Trainer are wrong if experts differ between ranks: clipping takes the norm over this rank's
parameters, rank 0 saves its weights and its optimizer's state for all, and all ranks load them. A callback runs after
clipping, and the Trainer calls `save_pretrained` on rank 0 only. So a subclass is necessary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symmoe import checkpoint as training_checkpoint
from symmoe.checkpoint import ModuleState
from symmoe.checkpoint.peers import Peers
from symmoe.checks.extras import extra
from symmoe.errors import ArgumentError
from symmoe.integrations.transformers.checkpoint import load_checkpoint, save_checkpoint
from symmoe.integrations.transformers.swap import heap_of
from symmoe.moe.ddp_and_fsdp import prepare_for_ddp
from symmoe.training.gradients import clip_grad_norm

with extra("transformers"):
    import transformers

OPTIMIZER_FOLDER = "optimizer"
_SCHEDULER = "scheduler.pt"  # the Trainer's name


class Trainer(transformers.Trainer):
    """transformers.Trainer for a model of `swap_moe` or `from_pretrained` on all ranks of a DDP.

    Arguments, batches, losses, logs and callbacks are the Trainer's own. `max_grad_norm` limits the gradient's norm
    over all ranks. Checkpoints are transformers' own, with all experts, and load into the unmodified model; only the
    optimizer's state is in symmoe's format (`symmoe.checkpoint`, in the folder "optimizer" of a checkpoint, with the
    trained parameters), and loads on any number of ranks. `train`, `evaluate`, `predict` and `save_model`
    are collective. For a Trainer of another package: `class MyTrainer(Trainer, TheirTrainer)`.

    Raises:
        ArgumentError: the model is not swapped; or `fp16`, `fsdp` or `deepspeed`: fp16's gradient scaler would skip
            steps on some ranks only, and fsdp and deepspeed would mix experts.
    """

    # They may be None.
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        heap_of(self.model)
        for name in ("fp16", "fsdp", "deepspeed"):
            if value := getattr(self.args, name):
                raise ArgumentError(
                    f"args.{name} ({value!r}) must not be set with experts on several ranks"
                )

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        if training and model is self.model:
            prepare_for_ddp(
                model
            )  # swap_moe did this on the bare model, which peft may have wrapped
        return super()._wrap_model(model, training, dataloader)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """As in transformers, with a balance loss that counts once, as a mean over ranks and micro-batches."""
        if num_items_in_batch is None:  # a mean, like losses of other packages without outputs
            return super().compute_loss(model, inputs, return_outputs)
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        # Whether the model's loss includes the balance loss of its routers.
        if isinstance(outputs, dict) and all(
            outputs.get(name) is not None for name in ("loss", "aux_loss")
        ):
            # The token losses are divided by all ranks' token count, so ranks and micro-batches add up. The
            # balance loss, a mean, would add up too.
            times = self.args.world_size if self.args.average_tokens_across_devices else 1
            parts = self.current_gradient_accumulation_steps if model.training else 1
            loss = (
                loss - (times - 1 / parts) * _balance_coefficient(self.model) * outputs["aux_loss"]
            )
        return (loss, outputs) if return_outputs else loss

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return clip_grad_norm(self.model, self.args.max_grad_norm)

    def _get_grad_norm(
        self, model: nn.Module, grad_norm: torch.Tensor | None = None
    ) -> torch.Tensor:
        return clip_grad_norm(self.model, float("inf")) if grad_norm is None else grad_norm

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        folder = str(self.args.output_dir if output_dir is None else output_dir)
        with Peers(None) as peers, peers.step(is_last=True):
            if 0 in heap_of(self.model).bootstrap.global_ranks:  # one of several EP groups
                _save_or_load_by(self.model)[0](self.model, folder)
        if self.args.should_save:  # other files: the tokenizer, the arguments
            attributes = vars(self.model)
            refused, attributes["save_pretrained"] = (
                attributes["save_pretrained"],
                lambda *args, **kwargs: None,
            )
            try:
                super()._save(folder)
            finally:
                attributes["save_pretrained"] = refused

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        _save_or_load_by(self.model)[1](self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _trained(self) -> dict[str, Any]:
        """The trained parameters, by name, and their optimizer, as arguments of `symmoe.checkpoint`."""
        trained = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        return {
            "model": ModuleState(module=self.model, tensors=trained),
            "optimizer": self.optimizer.optimizer,
        }

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        training_checkpoint.save_checkpoint(
            Path(output_dir, OPTIMIZER_FOLDER),
            self.state.global_step,
            keep_last=1,
            **self._trained(),
        )
        if self.args.should_save:
            with warnings.catch_warnings(record=True):  # ignores "also save the optimizer"
                torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not Path(checkpoint, OPTIMIZER_FOLDER).is_dir():
            return  # as with save_only_model
        training_checkpoint.load_checkpoint(Path(checkpoint, OPTIMIZER_FOLDER), **self._trained())
        with warnings.catch_warnings(record=True):
            self.lr_scheduler.load_state_dict(
                torch.load(Path(checkpoint, _SCHEDULER), weights_only=True)
            )


def _balance_coefficient(model: Any) -> float:
    """The factor of a model's balance loss."""
    coefficients = [
        getattr(owner, name)
        for owner in (model, model.config.get_text_config())
        for name in ("router_aux_loss_coef", "aux_loss_coef")
        if hasattr(owner, name)
    ]
    if not coefficients:
        raise ArgumentError(
            f"model ({type(model).__name__}) has a balance loss, and no router_aux_loss_coef that says what it counts"
        )
    return float(coefficients[0])


def _save_or_load_by(
    model: nn.Module,
) -> tuple[Callable[[Any, str], None], Callable[[Any, str], None]]:
    """The functions that save and load a whole model, or a PeftModel's adapters."""
    if not hasattr(model, "peft_type"):
        return save_checkpoint, load_checkpoint
    from symmoe.integrations.peft import load_adapters, save_adapters  # needs an optional package

    return save_adapters, load_adapters
