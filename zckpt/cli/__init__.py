"""The command line: `main` runs it, and `cli` is the group of its commands.

commands.py     inspect, convert, reshard, export, clean-up, formats, schema, help
checking.py     verify, diff, stats, probe-diff
mending.py      mend
pages.py        report, and how a page is saved
resuming.py     auto-resume, check, list
options.py      the options that several commands share
parameters.py   turns the text of an option into its value
documents.py    the keys and types of --json, and their JSON Schema
help.py         how `--help` looks
launched.py     runs a command in this process, or in all processes of a launch
several_paths.py  commands with several PATHs: a line per path, or one document
failures.py     turns an exception into an error message and an exit code
run.py          runs a command: exit codes, printed errors
signals.py      Ctrl-C, SIGTERM and SIGHUP
output.py       standard output, also if it is closed, full or unread
"""

from .commands import cli as cli
from .run import main as main
