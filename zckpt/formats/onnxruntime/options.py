"""Which options do ONNX Runtime's checkpoints understand?"""

from msgspec.structs import replace

from ...training.options import ALLOW_OBJECT, DIALECT, DP, DTYPE, WEIGHTS_ONLY

OPTIONS = (
    DP,
    WEIGHTS_ONLY,
    DTYPE,
    replace(DIALECT, choices=("hdf5", "l2"), usual="hdf5"),
    ALLOW_OBJECT,
)
