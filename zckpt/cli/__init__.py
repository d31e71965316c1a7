"""The command line: `main` runs it, and `cli` is the group of its commands.

commands.py     inspect, convert, reshard, export
checking.py     verify, diff, stats, probe-diff
pages.py        report, and --html of others
resuming.py     auto-resume, check
options.py      the options that they share; parameters.py reads values
help.py         how `--help` looks
launched.py     in this process alone, or in all processes of a launch
run.py          how a command ends: exit code and error
signals.py      what happens at Ctrl-C
output.py       standard output that is closed, full or unread
"""

from .commands import cli as cli
from .run import main as main
