"""Hugging Face's Trainer with a callback."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from problems import STEPS, WORDS, next_words, own_data, say, sentences
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import peerd


def build() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


test_loss = next_words


class Together(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **rest: Any) -> None:
        self.swarm = peerd.attach(model, optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **rest: Any) -> None:
        self.swarm.step(samples=args.train_batch_size * args.gradient_accumulation_steps)
        say(self.swarm, test_loss(model))
        control.should_training_stop = self.swarm.step_count >= STEPS or self.swarm.alone

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.swarm.finish()


def main() -> None:
    model = build()
    own_data()
    data = [{"input_ids": words, "labels": words} for words in sentences(512)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=16, max_steps=100_000, learning_rate=0.01, lr_scheduler_type="constant",
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=data, callbacks=[Together()]).train()
    print(f"ends with a test loss of {test_loss(model):.9g}", flush=True)


if __name__ == "__main__":
    main()
