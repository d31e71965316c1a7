"""zckpt's own format: whole tensors as safetensors, under slots, with a manifest.

files.py      which files make the checkpoint, and the version that is written
read.py       manifest.json, and where the safetensors files hold each tensor
agreement.py  whether the parts of manifest.json agree
write.py      the files for `convert --to universal`
options.py    what a user may ask of these files
functions.py  what zckpt does with them
"""

from ..format import Format
from .files import detect
from .options import OPTIONS, REASONS

FORMAT = Format(
    name="universal",
    about="zckpt's own: whole tensors as safetensors",
    family="universal",
    detect=detect,
    options=OPTIONS,
    reasons=REASONS,
    is_neutral=True,
    keeps_estimates=True,
)
