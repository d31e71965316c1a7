"""What does zckpt do with these files?"""

from ..format import Functions
from .gather import partitions
from .obstacles import obstacles
from .read import check, read, rebuilt, way_out
from .write import lay_out, lay_out_like, seal

FUNCTIONS = Functions(
    read=read,
    lay_out=lay_out,
    lay_out_like=lay_out_like,
    seal=seal,
    partitions=partitions,
    check=check,
    rebuilt=rebuilt,
    way_out=way_out,
    obstacles=obstacles,
)
