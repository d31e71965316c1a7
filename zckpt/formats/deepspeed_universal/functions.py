"""What does zckpt do with these files?"""

from ...training.groups import without_empty_groups
from ..format import Functions
from .read import read
from .write import lay_out, seal

FUNCTIONS = Functions(
    read=read,
    lay_out=lay_out,
    seal=seal,
    groups=without_empty_groups,
)
