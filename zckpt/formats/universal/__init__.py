"""zckpt's own format: full tensors in safetensors files, and a manifest.

files.py      finds the checkpoint's files; the version that is written
read.py       reads manifest.json, and finds tensors in the safetensors files
agreement.py  checks that the values in manifest.json do not contradict each other
flipped.py    finds the bit of a damaged manifest.json that was flipped
write.py      writes the files for `convert --to universal`
functions.py  the table of this format's functions
"""

from ...training.options import (
    DTYPE,
    GROUP_DEFAULTS,
    GROUPS_FROM,
    MAX_FILE_SIZE,
    SET_GROUP,
    WEIGHTS_ONLY,
)
from ..format import Format
from .files import ROLES, detect

FORMAT = Format(
    name="universal",
    about="zckpt's own: full tensors as safetensors",
    family="universal",
    detect=detect,
    roles=ROLES,
    options=(WEIGHTS_ONLY, DTYPE, GROUPS_FROM, SET_GROUP, GROUP_DEFAULTS, MAX_FILE_SIZE),
    reasons={"dp": "a universal checkpoint has no ranks"},
    is_neutral=True,
    keeps_estimates=True,
)
