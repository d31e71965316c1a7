"""The command line: `main` runs it, and `cli` is the group of its commands.

commands.py     inspect, convert, reshard, export, clean-up, formats, schema, help
checking.py     verify, diff, stats, probe-diff
mending.py      mend
pages.py        report, and how a page is saved
resuming.py     auto-resume, check, list
options.py      the options that they share; parameters.py reads values
documents.py    the keys and types of --json, and their JSON Schema
help.py         how `--help` looks
launched.py     in this process alone, or in all processes of a launch
several_paths.py  several PATHs of one command: a line each, one document
failures.py     what an error means for a command
run.py          how a command ends: exit code and error
signals.py      what happens at Ctrl-C
output.py       standard output that is closed, full or unread
"""

from .commands import cli as cli
from .run import main as main
