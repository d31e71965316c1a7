"""The table of functions of the format universal: reading, laying out files, checks."""

from ...core.checkpoint.manifest import Manifest
from ...errors import Notice, problem
from ...training.options import Options
from ..format import Functions
from .read import check, read
from .write import lay_out, seal, with_mended


def obstacles(_source: Manifest, _options: Options) -> list[Notice]:
    """Returns the reason why no run can load the files unchanged: no engine loads this format."""
    return [problem("format-differs", "zckpt's universal format, which no engine can load")]


FUNCTIONS = Functions(
    read=read,
    lay_out=lay_out,
    seal=seal,
    check=check,
    obstacles=obstacles,
    with_mended=with_mended,
)
