"""The header of a recording: settings, other than weights and data, that may make two runs differ.

    modules          the class of each module, by path
    dropout          the modules that drop elements now, with their probability
    compiled         modules that torch.compile compiled; compiled.py tells what is recorded of them
    seeds, random_state, flags, device, threads, versions

`random_state` is the CRC-32 of the generators' states when the recording begins. Runs with equal
seeds have different states if one of them has drawn more random numbers before.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch
from torch import nn

from ..core.storage.checksum import crc32
from ..core.version import __version__
from .compiled import is_compiled
from .subscribers import modules

LIBRARIES = ("torch", "numpy", "deepspeed", "transformers", "accelerate", "lightning", "peft")
"""The libraries whose versions are stated, if the program has imported them."""


def environment(model: nn.Module) -> dict[str, Any]:
    """Collects the header of a recording: versions, seeds and other settings, as JSON values.

    Draws no random numbers.
    """
    by_path = modules(model)
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    return {
        "versions": versions(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "seeds": seeds(),
        "random_state": random_state(),
        "flags": flags(),
        "dropout": {path: rate for path, module in by_path.items() if (rate := dropped(module))},
        "compiled": [path for path, module in by_path.items() if is_compiled(module)],
        "modules": {path: type(module).__name__ for path, module in by_path.items()},
    }


def versions() -> dict[str, str]:
    """The versions of zckpt, Python and the imported libraries, from their `__version__`.

    torch's version contains the build (2.13.0+cu130), unlike the version of the installed package.
    """
    versions_by_name = {"zckpt": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        if name in sys.modules:
            versions_by_name[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return versions_by_name


def seeds() -> dict[str, int]:
    """The seeds of torch's generators, as `torch.manual_seed` set them."""
    seeds_by_device = {"cpu": torch.initial_seed()}
    if _has_cuda():
        seeds_by_device["cuda"] = torch.cuda.initial_seed()
    return seeds_by_device


def random_state() -> str:
    """A CRC-32 of the states of torch's generators, in hexadecimal digits."""
    crc = crc32(bytes(torch.get_rng_state().tolist()))
    if _has_cuda():
        crc ^= crc32(bytes(torch.cuda.get_rng_state().tolist()))
    return f"{crc:08x}"


def _has_cuda() -> bool:
    """Whether the program has initialized CUDA; reading its seed or state would initialize it."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def flags() -> dict[str, Any]:
    """The settings of torch that affect which kernels are used, such as TF32."""
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
    }


def dropped(module: nn.Module) -> float:
    """The probability with which a module drops elements now; 0 for any other module.

    torch.nn's dropout modules store it as `p`, attention and recurrent layers as `dropout`. Modules
    of other libraries often store it under another name: then the result is 0, although they drop
    elements.
    """
    if not module.training:
        return 0.0
    is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
    rate = getattr(module, "p" if is_dropout else "dropout", 0.0)
    return float(rate) if isinstance(rate, (int, float)) else 0.0
