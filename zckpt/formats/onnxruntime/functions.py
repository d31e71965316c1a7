"""The table of functions of the format onnxruntime: reading, laying out files, checks."""

from ..format import Functions, other_dp
from .gather import partitions
from .read import copies, read
from .write import lay_out, seal

FUNCTIONS = Functions(
    read=read,
    lay_out=lay_out,
    seal=seal,
    partitions=partitions,
    copies=copies,
    obstacles=other_dp,
)
