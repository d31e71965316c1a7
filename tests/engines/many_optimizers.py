"""Optimizers of torch and of packages, by the name that the page shows: one row each.

A factory gets groups and gives the optimizers of a run: one, or Muon for matrices beside AdamW.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

WEIGHTS = tuple(f"{layer}.weight" for layer in (0, 2, 3))
BIASES = tuple(f"{layer}.bias" for layer in (0, 2, 3))
Groups = list[dict[str, Any]]


class Row(NamedTuple):
    """An optimizer: its package, its class, its arguments."""

    package: str
    kind: str
    arguments: Mapping[str, Any] = MappingProxyType({})
    width: int = 16  # of the model's inner layer

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters in the order of the groups, which state dicts give numbers."""
        return (*WEIGHTS, *BIASES)

    def build(self, groups: Groups) -> list[torch.optim.Optimizer]:
        return [self.optimizer(groups)]

    def optimizer(self, groups: Groups) -> torch.optim.Optimizer:
        module = importlib.import_module(self.package)
        result: torch.optim.Optimizer = getattr(module, self.kind)(groups, **self.arguments)
        return result


class Matrices(Row):
    """Takes matrices; AdamW takes the rest if `beside`."""

    beside = True

    def build(self, groups: Groups) -> list[torch.optim.Optimizer]:
        chosen: list[Groups] = [[], []]
        for group in groups:
            for number, wanted in enumerate((True, False)):
                members = [each for each in group["params"] if (each.ndim == 2) == wanted]
                if members:
                    chosen[number].append({**group, "params": members})
        matrices, others = chosen
        if not self.beside:
            for group in others:
                for each in group["params"]:
                    each.requires_grad_(False)
            return [self.optimizer(matrices)]
        return [self.optimizer(matrices), torch.optim.AdamW(others)]


class Alone(Matrices):
    """Matrices alone are trained."""

    beside = False
    names = WEIGHTS


TORCH = "torch.optim"
PACKAGE = "pytorch_optimizer"

ROWS: dict[str, Row] = {
    "Adam": Row(TORCH, "Adam"),
    "AdamW": Row(TORCH, "AdamW"),
    "AdamW, amsgrad": Row(TORCH, "AdamW", {"amsgrad": True}),
    "SGD": Row(TORCH, "SGD"),
    "SGD, momentum": Row(TORCH, "SGD", {"momentum": 0.9}),
    "RMSprop": Row(TORCH, "RMSprop", {"centered": True, "momentum": 0.9}),
    "NAdam": Row(TORCH, "NAdam"),
    "RAdam": Row(TORCH, "RAdam"),
    "Adamax": Row(TORCH, "Adamax"),
    "Adadelta": Row(TORCH, "Adadelta"),
    "Adagrad": Row(TORCH, "Adagrad"),
    "ASGD": Row(TORCH, "ASGD", {"t0": 1, "lambd": 0.1}),
    "Rprop": Row(TORCH, "Rprop"),
    "Adafactor": Row(TORCH, "Adafactor"),
    "LBFGS": Row(TORCH, "LBFGS"),
    "SparseAdam": Row(TORCH, "SparseAdam"),
    "Muon": Alone(TORCH, "Muon"),
    "Muon + AdamW": Matrices(TORCH, "Muon"),
    "AdEMAMix": Row(PACKAGE, "AdEMAMix", {"alpha": 2.0, "t_alpha_beta3": 10}),
    "SOAP": Row(PACKAGE, "SOAP", {"precondition_frequency": 2}),
    "Shampoo": Row(PACKAGE, "Shampoo", {"preconditioning_compute_steps": 2, "matrix_eps": 0.1}),
    "Prodigy": Row(PACKAGE, "Prodigy", {"d0": 0.5}),
    "Adan": Row(PACKAGE, "Adan"),
    "CAME": Row(PACKAGE, "CAME"),
    "Lion": Row(PACKAGE, "Lion"),
    "schedule-free AdamW": Row(PACKAGE, "ScheduleFreeAdamW"),
    "bitsandbytes AdamW8bit": Row("bitsandbytes.optim", "AdamW8bit", {"min_8bit_size": 256}, 64),
    "torchao AdamW8bit": Row("torchao.optim", "AdamW8bit", width=128),
}
