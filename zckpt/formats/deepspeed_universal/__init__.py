"""DeepSpeed's own universal checkpoints, which the engine loads with `load_universal`.

    files.py      which files make the checkpoint
    folders.py    its tensors: a folder per parameter, a file per state
    merged.py     everything else that the files say
    read.py       the manifest
    slicing.py    how the engine cuts a whole tensor for tensor parallelism
    write.py      such a directory for any data-parallel size
    options.py    what a user may ask of it

The model files are those of formats/deepspeed; both share formats/deepspeed_states.
"""

from ..deepspeed_states import OBJECTS
from ..format import Format

FORMAT = Format(
    name="deepspeed-universal",
    folder="deepspeed_universal",
    about="DeepSpeed's own universal checkpoints, for load_universal",
    family="deepspeed",
    compares="beginnings",
    states="it has place for tensors of the parameters' shapes, and for numbers that all "
    "parameters of a group share",
    groups="without_empty_groups",
    objects=OBJECTS,
)
