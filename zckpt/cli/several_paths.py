"""Commands with several PATHs: they print a line for each path, or one document of all reports.

If a path fails, its error takes the place of its report, and the command goes on. The exit code is
the highest exit code of all paths.
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
"""The argument of a command that accepts several checkpoints."""
Look = Callable[[str], tuple[Report, int]]
"""A function that returns the report of one path, and the exit code."""


def look_at_each(
    command: str,
    paths: Sequence[str],
    look: Look,
    show: Callable[[Report, bool], None],
    as_json: bool,
    quiet: bool,
) -> int:
    """Prints the reports of all paths, and returns the exit code.

    `look(path)` makes the report and the exit code of a path; `show(report, quiet)` prints it.
    """
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
        if as_json:  # otherwise the report's memory can be freed
            reports.append(report)
        codes.append(code)
    if as_json:
        display.document({"zckpt": VERSION, "command": command, "reports": reports})
    return max(codes)


def look_for_a_job(command: str, paths: Sequence[str], look: Look, form: str, as_json: bool) -> int:
    """Prints the findings of all paths for a CI job, and returns the exit code.

    `form` is "junit" (JUnit XML) or "github" (annotations).
    """
    if as_json:
        raise WrongOption(
            "options-conflict",
            f"--json and --format {form} cannot be given together",
            hint="leave one of them out",
        )
    reports: list[Report] = []
    codes: list[int] = []
    for path in paths:
        report, code = _looked(command, path, look)
        reports += [report] if report else []  # only rank 0 of a launch has a report
        codes.append(code)
    if reports:
        display.annotated(command, reports, form)
    return max(codes)


def _looked(command: str, path: str, look: Look) -> tuple[Report, int]:
    """The report of one path, or its error as a report; and the exit code."""
    try:
        return look(path)
    except (ProcessFailed, click.ClickException):  # of the command, and not of this path
        raise
    except Exception as error:
        trace()
        failure = failure_of(error)
        return failure.document(command) | {"path": path}, failure.code


def refuse_for_several(paths: Sequence[str], flag: str, is_given: object, way: str = "") -> None:
    """Raises WrongOption if an option for one PATH is given with several PATHs.

    `flag` is the option, and `way` the hint.
    """
    if is_given and len(paths) > 1:
        raise WrongOption(
            "options-conflict",
            f"{flag} works with one PATH only, but there are {len(paths)}",
            hint=way or f"leave out {flag}, or give the PATHs one by one",
        )


def refuse_to_share(paths: Sequence[str], single: bool) -> None:
    """Raises WrongOption if several paths are given in a launch of several processes.

    With `single` there is no error: each process works alone.
    """
    launch = None if single or len(paths) == 1 else launched()
    if launch is not None and launch.size > 1:
        raise WrongOption(
            "options-conflict",
            f"a launch of {launch.size} processes can share the work on one PATH only, not on "
            f"{len(paths)}",
            hint="add --single to use one process, or give the PATHs one by one",
        )
