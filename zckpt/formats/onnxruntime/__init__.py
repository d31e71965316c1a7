"""ONNX Runtime's ZeRO-1 checkpoints, 1.3 to 1.16; later versions write no such files.

    PREFIX.ZeRO.R.L.ort.pt, PREFIX.ort.pt    torch.save; called L1 before 1.7, L2 since then
    any name                                 HDF5, one file per rank

    files.py        finds the files of one checkpoint
    legacy.py       reads the files of torch.save
    hdf5.py         reads the HDF5 files
    ranks.py        one rank's tensors and counters, for both kinds of files
    partition.py    the elements of each weight that a rank owns; compares the files with this rule
    read.py         builds the manifest
    gather.py       the rule of ONNX Runtime's own aggregators
    write.py        writes L2 and HDF5 files for any data-parallel size
    functions.py    the table of this format's functions

Facts in this package are of onnxruntime-training 1.16.3 and its sources back to 1.3.
"""

from msgspec.structs import replace

from ...training.options import ALLOW_OBJECT, DIALECT, DP, DTYPE, WEIGHTS_ONLY
from ..format import Format
from .files import ROLES, detect, detect_weak

FORMAT = Format(
    name="onnxruntime",
    about="ONNX Runtime Training ZeRO-1, .ort.pt and HDF5, 1.3 to 1.16 (real files of 1.16.3)",
    family="onnxruntime",
    detect=detect,
    detect_weak=detect_weak,
    options=(
        DP,
        WEIGHTS_ONLY,
        DTYPE,
        replace(DIALECT, choices=("hdf5", "l2"), usual="hdf5"),
        ALLOW_OBJECT,
    ),
    reasons=dict.fromkeys(
        ("groups_from", "set_group"), "ONNX Runtime's files store no groups of the optimizer"
    ),
    compares="all",
    keeps_steps=True,
    states="ONNX Runtime stores only the moments of Adam and Lamb",
    roles=ROLES,
    objects=frozenset(),
)
