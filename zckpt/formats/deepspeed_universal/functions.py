"""What does zckpt do with these files?"""

from ..format import Functions
from ..groups import without_empty_groups
from .read import read
from .write import lay_out, seal

FUNCTIONS = Functions(
    read=read,
    lay_out=lay_out,
    seal=seal,
    groups=without_empty_groups,
)
