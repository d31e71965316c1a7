"""The table of functions of the format hf: reading and laying out files."""

from ..format import Functions
from .read import read
from .write import lay_out

FUNCTIONS = Functions(read=read, lay_out=lay_out)
