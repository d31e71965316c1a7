"""Lists the functions that read and write DeepSpeed's own universal checkpoints."""

from ...files.torchshell import seal_records
from ..format import Functions
from ..groups import of_trained
from .read import read
from .write import lay_out

FUNCTIONS = Functions(
    read=read,
    lay_out=lay_out,
    seal=seal_records,
    groups=of_trained,
    begins=lambda _source, _options: "group",  # its loader requires every state
)
