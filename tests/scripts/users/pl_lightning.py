"""Lightning: a module, its Trainer and a callback; the optimizer is a LightningOptimizer."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from problems import STEPS, own_data, own_numbers, say, squares
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import peerd


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        return functional.mse_loss(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Regression()


test_loss = squares


class Together(lightning.Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.swarm = peerd.attach(pl_module, pl_module.optimizers())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.swarm.step(loss=outputs["loss"], samples=len(batch[0]))  # as it comes: a tensor
        say(self.swarm, test_loss(pl_module))
        trainer.should_stop = self.swarm.step_count >= STEPS or self.swarm.alone

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.swarm.finish()


def main() -> None:
    model = build()
    own_data()
    loader = DataLoader(TensorDataset(*own_numbers(2048)), batch_size=32, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Together()],
    )  # fmt: skip
    trainer.fit(model, loader)
    print(f"ends with a test loss of {test_loss(model):.9g}", flush=True)


if __name__ == "__main__":
    main()
