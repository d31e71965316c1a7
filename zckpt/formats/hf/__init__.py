"""Folders for `from_pretrained` of transformers and PEFT: weights, and the files to load them.

    read.py       reads the weights of a folder that was laid out
    write.py      writes the folder for `zckpt export`
    options.py    the options of the folder
    functions.py  the table of this format's functions

zckpt only writes this format. It reads such folders as the format `gathered`, weights only.
"""

from ..format import Format
from .options import OPTIONS, REASONS

FORMAT = Format(
    name="hf",
    about="weights for from_pretrained of transformers and PEFT; --from gathered reads them",
    family="hf",
    options=OPTIONS,
    reasons=REASONS,
    is_plain=True,
    is_resumed=False,
)
