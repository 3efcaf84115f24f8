"""PEFT: adapters of rank 4 in a Llama whose base is frozen."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from problems import STEPS, WORDS, next_words, own_data, say, sentences
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import peerd


def build() -> nn.Module:
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=16, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    targets = ["q_proj", "v_proj", "down_proj", "lm_head"]
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))


test_loss = next_words


def main() -> None:
    model = build()
    trained = [p for p in model.parameters() if p.requires_grad]
    print(f"trains {sum(p.numel() for p in trained)} of {sum(p.numel() for p in model.parameters())}", flush=True)
    optimizer = torch.optim.AdamW(trained, lr=0.005)
    own_data()
    with peerd.attach(model, optimizer) as swarm:
        while swarm.step_count < STEPS and not swarm.alone:
            words = sentences(16)
            loss = model(input_ids=words, labels=words).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            swarm.step(loss=loss.item(), samples=len(words))
            say(swarm, test_loss(model))
    print(f"ends with a test loss of {test_loss(model):.9g}", flush=True)


if __name__ == "__main__":
    main()
