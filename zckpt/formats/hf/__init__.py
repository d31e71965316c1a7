"""Folders for `from_pretrained` of transformers and PEFT: weights, and the files that load them.

    read.py       the weights of a folder that was laid out
    write.py      the folder for `zckpt export`
    options.py    what a user may ask of the folder
    functions.py  what zckpt does with them

They are written only: a user reads such a folder as `gathered`, weights alone.
"""

from ..format import Format
from .options import OPTIONS, REASONS

FORMAT = Format(
    name="hf",
    about="weights for from_pretrained of transformers and PEFT; read as gathered",
    family="hf",
    options=OPTIONS,
    reasons=REASONS,
    is_plain=True,
    is_resumed=False,
)
