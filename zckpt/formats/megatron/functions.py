"""The functions of the format megatron, and the reasons why a run cannot load files unchanged.

fully_reshardable, fully_sharded_model_space, no distributed optimizer     any sizes can load it
dp_reshardable, dp_zero_gather_scatter: flat buffers                       any dp can load it
mp_rank_*: a folder for each model rank                                    any dp can load it
gated layers saved with torch's FSDP2                                      only the same dp and tp
"""

from ...core.checkpoint.manifest import Manifest
from ...errors import Notice
from ...training.options import DP, EP, PP, TP, Option, Options
from ..format import Functions, differs
from .common_state import FLAT, SIZES_OF_RUN, arguments
from .files import OF_RANKS, kind_of
from .fsdp2 import is_interleaved
from .gather import partitions
from .masters import sharding
from .read import copies, read, rebuilt, way_out
from .write import lay_out, lay_out_like, seal


def obstacles(source: Manifest, options: Options) -> list[Notice]:
    """Lists the sizes, such as tp, in which a run with these options differs from the source's run.

    Only sizes that must be equal for this kind of files are compared. If the list is empty, the run
    can load the files unchanged.
    """
    dialect = sharding(source)
    legacy = kind_of(source.root) == OF_RANKS
    kept = source.state.get("megatron")
    arguments_of_run = arguments(kept.get("common") if isinstance(kept, dict) else None)
    cutting: tuple[Option[int | None], ...]
    if is_interleaved(arguments_of_run):
        form, cutting = "gated layers of torch's FSDP2", (DP, TP)
    elif dialect in FLAT or legacy:
        form, cutting = f"{OF_RANKS} folders" if legacy else str(dialect), (TP, PP, EP)
    else:
        return []
    sizes_of_source = {
        option: arguments_of_run.get(SIZES_OF_RUN[option]) or 1 for option in cutting
    }
    return [
        differs(f"{option.name}, in {form}", size, options[option])
        for option, size in sizes_of_source.items()
        if options[option] not in (None, size)
    ]


FUNCTIONS = Functions(
    read=read,
    lay_out=lay_out,
    lay_out_like=lay_out_like,
    seal=seal,
    partitions=partitions,
    copies=copies,
    rebuilt=rebuilt,
    way_out=way_out,
    obstacles=obstacles,
)
