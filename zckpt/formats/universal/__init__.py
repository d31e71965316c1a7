"""zckpt's own format: whole tensors as safetensors, under slots, with a manifest.

files.py      which files make the checkpoint, and the version that is written
read.py       manifest.json, and where the safetensors files hold each tensor
agreement.py  whether the parts of manifest.json agree
write.py      the files for `convert --to universal`
functions.py  what zckpt does with them
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
    about="zckpt's own: whole tensors as safetensors",
    family="universal",
    detect=detect,
    roles=ROLES,
    options=(WEIGHTS_ONLY, DTYPE, GROUPS_FROM, SET_GROUP, GROUP_DEFAULTS, MAX_FILE_SIZE),
    reasons={"dp": "a universal checkpoint has no ranks"},
    is_neutral=True,
    keeps_estimates=True,
)
