"""zckpt's own format: whole tensors as safetensors, under slots, with a manifest.

files.py    which files make the checkpoint, and the version that is written
read.py     manifest.json, and where the safetensors files hold each tensor
write.py    the files for `convert --to universal`
"""

from ..format import Format

FORMAT = Format(
    name="universal",
    folder="universal",
    about="zckpt's own: whole tensors as safetensors",
    family="universal",
    options=frozenset({"dtype", "max_file_size", "group_defaults"}),
    reasons={"dp": "a universal checkpoint has no ranks"},
    is_neutral=True,
)
