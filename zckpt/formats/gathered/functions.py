"""The table of functions of the format gathered: reading, laying out files, checks."""

from ...core.checkpoint.manifest import Manifest
from ...core.passes.layout import Layout
from ...errors import Notice
from ...training.options import DP, Options
from ..format import Functions, other_dp
from ..groups import in_torch, with_trainers_groups
from . import write, write_ranks
from .gather import partitions
from .read import read


def lay_out(source: Manifest, options: Options) -> Layout:
    """Lays out the target's files: complete files or, with `--dp`, one set for each rank."""
    lay_out_files = write.lay_out if options[DP] is None else write_ranks.lay_out
    return lay_out_files(source, options)


def obstacles(source: Manifest, options: Options) -> list[Notice]:
    """Returns the reason why a run with another number of ranks cannot load the files, if any.

    The list is empty for complete files: any number of ranks can load them.
    """
    return other_dp(source, options) if source.run.origin.dp else []


FUNCTIONS = Functions(
    read=read,
    lay_out=lay_out,
    has_models=write.has_models,
    lay_out_model=write.lay_out,
    seal=write.seal,
    partitions=partitions,
    groups=with_trainers_groups,
    begins=in_torch,
    obstacles=obstacles,
)
