"""The table of functions of the format dcp: reading, laying out files, checks."""

from ..format import Functions
from ..groups import in_torch, with_trainers_groups
from .gather import partitions
from .read import read
from .write import has_models, lay_out, seal

FUNCTIONS = Functions(
    read=read,
    lay_out=lay_out,
    has_models=has_models,
    lay_out_model=lay_out,
    seal=seal,
    partitions=partitions,
    groups=with_trainers_groups,
    begins=in_torch,
)
