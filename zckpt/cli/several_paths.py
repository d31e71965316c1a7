"""What does a command say of several PATHs? A line for each, or one document of all reports.

A path that fails has its error in the place of its report, and does not keep the others away. The
exit code is the highest of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from .. import display
from ..core.passes.description import VERSION, Report
from ..errors import ProcessFailed, WrongOption
from ..processes.launcher import launched
from .failures import failure_of, trace
from .parameters import PATH

PATHS = click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=PATH)
"""The argument of a command that looks at each of several checkpoints."""
Look = Callable[[str], tuple[Report, int]]
"""What gives the report of one path, and the exit code."""


def look_at_each(
    command: str,
    paths: Sequence[str],
    look: Look,
    show: Callable[[Report, bool], None],
    as_json: bool,
    quiet: bool,
) -> int:
    """Prints the reports of all paths, and gives the exit code; `show` prints that of one."""
    reports: list[Report] = []
    codes: list[int] = []
    for path in paths:
        try:
            report, code = look(path)
        except (ProcessFailed, click.ClickException):  # of the command, and not of this path
            raise
        except Exception as error:
            trace()
            failure = failure_of(error)
            report, code = failure.document(command) | {"path": path}, failure.code
            if not as_json:
                failure.tell()
        else:
            if not as_json:
                show(report, quiet)
        if as_json:  # the others' memory is free again
            reports.append(report)
        codes.append(code)
    if as_json:
        display.document({"zckpt": VERSION, "command": command, "reports": reports})
    return max(codes)


def look_for_a_job(command: str, paths: Sequence[str], look: Look, form: str, as_json: bool) -> int:
    """Prints the findings of all paths as `form`, and gives the exit code, as `look_at_each`."""
    if as_json:
        raise WrongOption(
            "options-conflict",
            f"--json and --format {form} are two forms of one report",
            hint="leave one of them out",
        )
    reports: list[Report] = []
    codes: list[int] = []
    for path in paths:
        report, code = _looked(command, path, look)
        reports += [report] if report else []  # rank 0 has the report of all
        codes.append(code)
    if reports:
        display.annotated(command, reports, form)
    return max(codes)


def _looked(command: str, path: str, look: Look) -> tuple[Report, int]:
    """The report of one path, or its error as a document, and the exit code."""
    try:
        return look(path)
    except (ProcessFailed, click.ClickException):  # of the command, and not of this path
        raise
    except Exception as error:
        trace()
        failure = failure_of(error)
        return failure.document(command) | {"path": path}, failure.code


def refuse_for_several(paths: Sequence[str], flag: str, is_given: object, way: str = "") -> None:
    """Raises WrongOption if an option for one path is given with several; `way` is a way out."""
    if is_given and len(paths) > 1:
        raise WrongOption(
            "options-conflict",
            f"{flag} is for one PATH, and there are {len(paths)}",
            hint=way or f"leave out {flag}, or give the PATHs one by one",
        )


def refuse_to_share(paths: Sequence[str], single: bool) -> None:
    """Raises WrongOption if the processes of a launch would share several paths."""
    launch = None if single or len(paths) == 1 else launched()
    if launch is not None and launch.size > 1:
        raise WrongOption(
            "options-conflict",
            f"{launch.size} processes of a launch share one PATH, and there are {len(paths)}",
            hint="add --single, for one process that works alone, or give the PATHs one by one",
        )
