"""DeepSpeed's own universal checkpoints, which the engine loads with `load_universal`.

    files.py      finds the checkpoint's files
    merged.py     reads everything except the tensors below zero/
    read.py       builds the manifest and its tensors: a folder per parameter, a file per state
    slicing.py    how the engine cuts a full tensor for tensor parallelism
    write.py      writes such a directory for any data-parallel size
    functions.py  the table of this format's functions

The model files are those of formats/deepspeed; both share formats/deepspeed_states.
"""

from ..deepspeed_states import OBJECTS, options
from ..format import Format
from .files import KIND, ROLES

FORMAT = Format(
    name="deepspeed-universal",
    about="DeepSpeed's own universal checkpoints, for load_universal",
    family="deepspeed",
    detect=KIND.detect,
    roles=ROLES,
    options=options.OPTIONS,
    compares="beginnings",
    keeps_shapes=True,
    states="it stores only tensors of the parameters' shapes, and numbers that all parameters of a "
    "group share",
    objects=OBJECTS,
)
