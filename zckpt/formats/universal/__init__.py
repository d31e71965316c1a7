"""zckpt's own format: whole tensors as safetensors, under slots, with a manifest.

files.py       which files make the checkpoint, and the version that is written
read.py        manifest.json, and where the safetensors files hold each tensor
agreement.py   whether the parts of manifest.json agree
write.py       the files for `convert --to universal`
options.py     what a user may ask of these files
"""

from ..format import Format

FORMAT = Format(
    name="universal",
    folder="universal",
    about="zckpt's own: whole tensors as safetensors",
    family="universal",
    is_neutral=True,
    checks=True,
    keeps_estimates=True,
)
