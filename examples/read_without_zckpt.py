"""A universal checkpoint, read with nothing but safetensors.

python examples/read_without_zckpt.py UNIVERSAL
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

universal = Path(sys.argv[1])
manifest = json.loads((universal / "manifest.json").read_text())
weights = load_file(universal / "master.safetensors")
first_moments = load_file(universal / "exp_avg.safetensors")

print(f"written by {manifest['source']['format']} {manifest['source']['version']}")
print(f"step {manifest['step']}, {manifest['optimizer']}")
for name, parameter in manifest["parameters"].items():
    if parameter["trainable"]:
        group = manifest["groups"][parameter["group"]]
        norm, moment = np.linalg.norm(weights[name]), np.linalg.norm(first_moments[name])
        print(f"{name:20} {parameter['shape']!s:10} lr {group['lr']:g}  {norm:8.4f} {moment:10.3e}")
