"""What does zckpt do with these files?"""

from ..format import Functions
from .read import check, read
from .write import lay_out, seal

FUNCTIONS = Functions(
    read=read,
    lay_out=lay_out,
    seal=seal,
    check=check,
)
