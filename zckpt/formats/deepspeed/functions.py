"""What does zckpt do with these files?"""

from ...files.torchshell import seal_records
from ..format import Functions
from ..groups import of_trained
from .gather import partitions
from .obstacles import obstacles
from .read import averaged, check, check_slices, read
from .write import lay_out, lay_out_like

FUNCTIONS = Functions(
    read=read,
    lay_out=lay_out,
    lay_out_like=lay_out_like,
    seal=seal_records,
    partitions=partitions,
    averaged=averaged,
    check=check,
    check_slices=check_slices,
    groups=of_trained,
    obstacles=obstacles,
)
