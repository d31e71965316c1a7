"""Every optimizer the checkpoints are made with, by name.

What differs between them is what they keep: which tensors, and where the number of steps lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Groups = list[dict[str, Any]]


class Lion(torch.optim.Optimizer):
    """A user's own class: one tensor per parameter and no step at all."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"lr": 0.001, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, parameter, gradient in gradients(self.param_groups):
            first, second = group["betas"]
            average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
            update = average.lerp(gradient, 1 - first).sign_()
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update, alpha=-group["lr"])
            average.lerp_(gradient, 1 - second)


class Odd(torch.optim.Optimizer):
    """A user's own class whose states are of every kind, and each of them scales the update."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"lr": 0.001, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, parameter, gradient in gradients(self.param_groups):
            state = self.state[parameter]
            if not state:
                state |= {"exp_avg": torch.zeros_like(parameter), "count": 0, "flag": False}
                state |= {"rate": 1.5, "gain": torch.tensor(1.5), "width": torch.tensor([2.5])}
            state["count"] += 1
            state["flag"] = not state["flag"]
            state["rate"] *= 0.75
            state["gain"] *= 0.875
            state["width"] *= 0.625
            scale = (
                state["rate"] * state["gain"] * state["width"] / (state["count"] + state["flag"])
            )
            average = state["exp_avg"].lerp_(gradient, 0.25)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(average * scale * group["lr"])


class Counted(torch.optim.SGD):
    """Counts updates in its `state`, as pytorch_optimizer's SPAM, and beside it, as Ranger21; each
    count scales the update."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, lr=0.001, momentum=0.9)
        self.number = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "number": self.number}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = dict(state_dict)
        self.number = own.pop("number")
        super().load_state_dict(own)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.number += 1
        state: dict[Any, Any] = self.state
        state["number"] = count = state.get("number", 0) + 1
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] *= self.number + 3 * count
        super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


class Estimating(torch.optim.Optimizer):
    """Estimates a learning rate from the gradients it sees, as Prodigy does: under ZeRO each rank
    has its own."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"lr": 0.01, "weight_decay": 0.0, "d": 1e-3, "d_max": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, parameter, gradient in gradients(self.param_groups):
            average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
            average.lerp_(gradient, 0.25)
            group["d"] = 0.5 * group["d"] + gradient.abs().sum().item()
            group["d_max"] = max(group["d"], group["d_max"])
            parameter.sub_(average * group["lr"] * group["d"] / group["d_max"])


class Matrices(torch.optim.Optimizer):
    """Keeps states as SOAP and 8-bit optimizers do: of other shapes than the parameter's.

    `GG` is a list of matrices, `scales` has a number for every 16 elements.
    """

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"lr": 0.001, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, parameter, gradient in gradients(self.param_groups):
            state, flat = self.state[parameter], gradient.reshape(-1).float()
            row = torch.nn.functional.pad(flat[:3], (0, 3 - len(flat[:3])))
            blocks = torch.nn.functional.pad(flat, (0, -len(flat) % 16)).reshape(-1, 16)
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["GG"] = [torch.zeros(3, 3), torch.zeros(2, 2)]
                state["scales"] = torch.zeros(len(blocks))
            for matrix in state["GG"]:
                part = row[: len(matrix)]
                matrix.lerp_(torch.outer(part, part), 0.25)
            state["scales"].lerp_(blocks.abs().amax(1), 0.5)
            scale = 1 / (1 + state["GG"][0].norm() + state["GG"][1].norm())
            widths = state["scales"].repeat_interleave(16)[: len(flat)].view_as(gradient)
            average = state["exp_avg"].lerp_(gradient, 0.25)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(average * scale * (1 + widths.to(average.dtype)) * group["lr"])


class Graft:
    """An object in a state, as those of Shampoo."""

    def __init__(self, parameter: Tensor) -> None:
        self.momentum = torch.zeros_like(parameter)
        self.counts = [0]


class Grafted(torch.optim.Optimizer):
    """Keeps a state that is an object of a class."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"lr": 0.001, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, parameter, gradient in gradients(self.param_groups):
            state = self.state[parameter]
            if not state:
                state |= {"exp_avg": torch.zeros_like(parameter), "graft": Graft(parameter)}
            graft = state["graft"]
            graft.momentum.lerp_(gradient, 0.5)
            graft.counts[0] += 1
            average = state["exp_avg"].lerp_(gradient, 0.25)
            parameter.sub_((average + graft.momentum) * group["lr"] / graft.counts[0])


class Lamb(torch.optim.Optimizer):
    """Emulates what DeepSpeed's FusedLamb keeps (0.19.8); the real one needs a GPU."""

    def __init__(self, groups: Groups) -> None:
        defaults = {"lr": 0.001, "betas": (0.9, 0.95), "weight_decay": 0.0, "eps": 1e-8}
        super().__init__(groups, {**defaults, "max_coeff": 10.0, "min_coeff": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, parameter, gradient in gradients(self.param_groups):
            state, (first, second) = self.state[parameter], group["betas"]
            state["step"] = state.get("step", 0) + 1
            mean = state.setdefault("exp_avg", torch.zeros_like(parameter))
            square = state.setdefault("exp_avg_sq", torch.zeros_like(parameter))
            mean.lerp_(gradient, 1 - first)
            square.lerp_(gradient.square(), 1 - second)
            update = mean / square.sqrt().add_(1e-8) + group["weight_decay"] * parameter
            trust = parameter.norm().clamp(0.01, 10) / update.norm().clamp(1e-6)
            parameter.sub_(update * trust.clamp(0.01, 0.3) * group["lr"])


class FusedAdam(torch.optim.Optimizer):
    """Emulates what DeepSpeed's FusedAdam keeps, 0.6.5 and newer; the real one must be compiled.

    An int `step` in each state is the truth, `step` of the group is written once as 0.
    """

    def __init__(self, groups: Groups) -> None:
        defaults = {"lr": 0.001, "betas": (0.8, 0.95), "weight_decay": 0.0, "eps": 1e-8}
        super().__init__(groups, {**defaults, "bias_correction": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, parameter, gradient in gradients(self.param_groups):
            group.setdefault("step", 0)
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            adam_update(parameter, gradient, state, state["step"], group)


class ApexFusedAdam(torch.optim.Optimizer):
    """Emulates Apex's FusedAdam, and DeepSpeed's before 0.6.5: only groups have a `step`."""

    def __init__(self, groups: Groups) -> None:
        defaults = {"lr": 0.001, "betas": (0.8, 0.95), "weight_decay": 0.0, "eps": 1e-8}
        super().__init__(groups, {**defaults, "bias_correction": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        for group, parameter, gradient in gradients(self.param_groups):
            adam_update(parameter, gradient, self.state[parameter], group["step"], group)


class AdEMAMix(torch.optim.Optimizer):
    """What pytorch_optimizer's class of this name keeps: `step` in groups, three moments."""

    def __init__(self, groups: Groups) -> None:
        defaults = {"lr": 0.001, "betas": (0.8, 0.95, 0.99), "weight_decay": 0.0, "eps": 1e-8}
        super().__init__(groups, {**defaults, "weight_decouple": True, "alpha": 5.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        for group, parameter, gradient in gradients(self.param_groups):
            state, (first, second, third) = self.state[parameter], group["betas"]
            mean = state.setdefault("exp_avg", torch.zeros_like(parameter))
            square = state.setdefault("exp_avg_sq", torch.zeros_like(parameter))
            slow = state.setdefault("exp_avg_slow", torch.zeros_like(parameter))
            mean.lerp_(gradient, 1 - first)
            square.lerp_(gradient.square(), 1 - second)
            slow.lerp_(gradient, 1 - third)
            step = group["step"]
            scale = (square / (1 - second**step)).sqrt_().add_(group["eps"])
            alpha = group["alpha"] * min(1.0, step / 10)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            update = mean / (1 - first**step) + alpha * slow
            parameter.addcdiv_(update, scale, value=-group["lr"])


def gradients(groups: Groups) -> Iterable[tuple[dict[str, Any], Tensor, Tensor]]:
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield group, parameter, parameter.grad


def adam_update(
    parameter: Tensor, gradient: Tensor, state: dict[str, Any], step: int, group: dict[str, Any]
) -> None:
    first, second = group["betas"]
    mean = state.setdefault("exp_avg", torch.zeros_like(parameter)).lerp_(gradient, 1 - first)
    square = state.setdefault("exp_avg_sq", torch.zeros_like(parameter))
    square.lerp_(gradient.square(), 1 - second)
    scale = (square / (1 - second**step)).sqrt_().add_(1e-8)
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.addcdiv_(mean / (1 - first**step), scale, value=-group["lr"])


def tensor_lr(groups: Groups) -> torch.optim.Optimizer:
    groups = [{**group, "lr": torch.tensor(group["lr"])} for group in groups]
    return torch.optim.AdamW(groups, betas=(0.8, 0.95))


def trained_alone(groups: Groups) -> Groups:
    """Without the frozen parameters, as most programs make an optimizer."""
    return [
        {**group, "params": [each for each in group["params"] if each.requires_grad]}
        for group in groups
    ]


def adamw_of_trained(groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained_alone(groups), betas=(0.8, 0.95))


def deepspeed_fused_adam(groups: Groups) -> Any:
    from deepspeed.ops.adam import FusedAdam as Compiled

    return Compiled(groups, betas=(0.8, 0.95))


def deepspeed_fused_lamb(groups: Groups) -> Any:
    from deepspeed.ops.lamb import FusedLamb

    return FusedLamb(groups, betas=(0.8, 0.95))


def deepspeed_cpu_adam(groups: Groups) -> Any:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, betas=(0.8, 0.95))


def deepspeed_cpu_adam_narrow(groups: Groups) -> Any:
    """Its moments have the precision of the masters."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(groups, betas=(0.8, 0.95), fp32_optimizer_states=False)


def deepspeed_cpu_lion(groups: Groups) -> Any:
    from deepspeed.ops.lion import DeepSpeedCPULion

    return DeepSpeedCPULion(groups)


FACTORIES: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.95)),
    "adamw of trained": adamw_of_trained,
    "adam": lambda groups: torch.optim.Adam(groups, betas=(0.8, 0.95)),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.5), amsgrad=True),
    "tensor lr": tensor_lr,
    "torch fused adamw": lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.95), fused=True),
    "capturable adamw": lambda groups: torch.optim.AdamW(groups, capturable=True),
    "nadam": torch.optim.NAdam,
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, centered=True, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
    "momentum": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "lion": Lion,
    "odd": Odd,
    "estimating": Estimating,
    "counted": Counted,
    "matrices of trained": lambda groups: Matrices(trained_alone(groups)),
    "grafted of trained": lambda groups: Grafted(trained_alone(groups)),
    "adafactor": torch.optim.Adafactor,
    "lamb": Lamb,
    "fused adam": FusedAdam,
    "apex fused adam": ApexFusedAdam,
    "ademamix": AdEMAMix,
    "deepspeed fused adam": deepspeed_fused_adam,
    "deepspeed fused lamb": deepspeed_fused_lamb,
    "deepspeed cpu adam": deepspeed_cpu_adam,
    "deepspeed cpu adam narrow": deepspeed_cpu_adam_narrow,
    "deepspeed cpu lion": deepspeed_cpu_lion,
}
