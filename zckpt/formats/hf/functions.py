"""The functions of the format hf."""

from ..format import Functions
from .read import read
from .write import lay_out

FUNCTIONS = Functions(read=read, lay_out=lay_out)
