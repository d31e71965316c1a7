"""Prints results: tables, progress bars and JSON. Only this package imports rich.

Data go to stdout, everything else to stderr. On a terminal, rich draws tables and bars. In a pipe
or a file, tables are plain columns that grep and awk can read, and there are no bars.

    annotations.py  findings for continuous integration
    checkpoint.py   what a checkpoint contains, and what a conversion wrote
    findings.py     what verify, diff, stats, probe-diff, check and report found
    listing.py      the state of the checkpoints of a run
    mending.py      which damaged bytes and lost tensors `mend` can restore
    picture.py      drawings: the differences of two recorded runs, and the layers of a model
    tables.py       tables that fit on a terminal
    terminal.py     progress bars, colours, JSON and files
"""

from .annotations import annotated as annotated
from .checkpoint import converted as converted
from .checkpoint import layout as layout
from .checkpoint import steps as steps
from .checkpoint import summary as summary
from .checkpoint import summary_in_a_line as summary_in_a_line
from .checkpoint import tensors as tensors
from .findings import differing as differing
from .findings import fitting as fitting
from .findings import fitting_in_a_line as fitting_in_a_line
from .findings import probed as probed
from .findings import reported as reported
from .findings import statistics as statistics
from .findings import verified as verified
from .findings import verified_in_a_line as verified_in_a_line
from .listing import listed_run as listed_run
from .mending import damaged as damaged
from .mending import mended as mended
from .tables import table as table
from .terminal import answer as answer
from .terminal import can_save as can_save
from .terminal import document as document
from .terminal import progress as progress
from .terminal import save as save
from .terminal import save_text as save_text
from .terminal import warn as warn
