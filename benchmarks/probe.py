"""Measures the cost of recording: training steps of a transformer, with and without recording.

    python -m benchmarks.probe --rounds 15
    python -m benchmarks.probe --parts            where the time of one step's recording goes

The model has GPT-2's layers of hidden size 1024. A step has 2048 tokens, AdamW, and fp32 or --dtype
bf16 (autocast), on this machine's processor. Recorded are activations and gradients of all modules,
with CRC-32 and samples.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from zckpt import probe
from zckpt.probe import runs
from zckpt.probe.statistics import Measurer

from .measure import spread

TARGETS = {"fp32": 1.10, "bf16": 1.15}  # times a step that is not recorded
VOCABULARY = 8192


class Block(nn.Module):
    """A transformer layer like GPT-2's; each of its parts is a module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        rows, tokens, width = hidden.shape
        parts = self.attention(self.norm_1(hidden)).view(rows, tokens, 3, self.heads, 64)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(rows, tokens, width))
        output: Tensor = hidden + self.mlp(self.norm_2(hidden))
        return output


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(self.embedding(tokens))
        return functional.cross_entropy(
            self.head(self.norm(hidden)).flatten(0, 1).float(), tokens.flatten()
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--parts", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = Transformer(arguments.width, arguments.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCABULARY, (2, arguments.tokens // 2))
    half = arguments.dtype == "bf16"

    def step() -> tuple[float, float]:
        """Runs one training step; returns wall and CPU seconds."""
        started, used = time.perf_counter(), time.process_time()
        with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started, time.process_time() - used

    with tempfile.TemporaryDirectory() as folder:
        times: dict[str, list[tuple[float, float]]] = {"plain": [], "recorded": []}
        for number in range(arguments.rounds + 1):
            plain = step()
            with probe.record(model, Path(folder) / str(number), step=number):
                recorded = step()
            if number:
                times["plain"].append(plain)
                times["recorded"].append(recorded)
        records = runs.read(Path(folder) / "1").ranks[0]
    elements = sum(record.numbers.get("elements", 0) for record in records)
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"n = {arguments.rounds}, {torch.get_num_threads()} threads, load average {load}")
    print(f"{len(records)} records of {elements / 1e6:.0f} million elements a step")
    for place, unit in enumerate(("wall", "CPU")):
        plain_times, recorded_times = ([cost[place] for cost in costs] for costs in times.values())
        pairs = [two / one for one, two in zip(plain_times, recorded_times, strict=True)]
        ratio = statistics.median(pairs)
        print(f"{unit}: plain {spread(plain_times)} s a step, recorded {spread(recorded_times)} s")
        target = TARGETS[arguments.dtype]
        good = "met" if ratio <= target else "MISSED"
        print(f"{unit}: recorded / plain {spread(pairs)}; target <= {target}: {good}")
    if arguments.parts:
        parts(arguments.tokens, 4 * arguments.width)


def parts(rows: int, width: int) -> None:
    """Prints how long measuring the largest activation takes, in nanoseconds per element."""
    for threads in (1, torch.get_num_threads()):
        for dtype in (torch.float32, torch.bfloat16):
            tensor = torch.randn(rows, width).to(dtype)
            measurer = Measurer(1 << 22, 32, threads, on_cpu=False)
            times = []
            for number in range(9):
                tensor[0, 0] = number  # what was measured before is known
                started = time.perf_counter()
                measurer.describe(tensor)
                times.append((time.perf_counter() - started) / tensor.numel() * 1e9)
            measurer.close()
            print(f"{threads} threads, {dtype}: {spread(times)} ns an element")


if __name__ == "__main__":
    main()
