"""The report of a conversion before its first byte is written."""

from __future__ import annotations

from ..core.checkpoint.manifest import Manifest
from ..core.passes.description import VERSION, Report, said
from ..core.passes.layout import Layout
from ..errors import counted, warning
from ..formats.format import Format
from ..naming import ties
from ..training.hyperparameters import unused_defaults
from ..training.options import DP, LIKE, SET_GROUP, Options


def report_on(
    command: str,
    manifest: Manifest,
    target: str,
    format: Format,
    layout: Layout,
    files: dict[str, int],
    options: Options,
) -> Report:
    """Makes the report of a conversion, as far as it is known before files are written."""
    warnings = list(layout.warnings)
    takes_others = format.overrides_groups and options[LIKE] is None
    if not (takes_others or options.weights_only):
        asked = Options(options.given)  # these reads must not count as uses of the options
        replaceable = SET_GROUP in (format.options or ())
        warnings += unused_defaults(manifest, asked, replaceable)
    warnings += [
        warning(
            "tie-inferred",
            f"the source has no output layer: if the model ties {alias} to {owner}, add --tie "
            f"{alias}={owner}",
            subject=owner,
        )
        for alias, owner in ([] if format.is_neutral else ties.likely(manifest))
    ]
    takes_dp = DP in (format.options or ()) and not format.fits_any_dp
    if command == "reshard" and not options.given and takes_dp:
        ranks = counted(manifest.dp, "rank")
        message = f"no --dp was given: the target is for {ranks}, like the source"
        warnings.append(warning("size-kept", message))
    return {
        "zckpt": VERSION,
        "command": command,
        "dropped": [],
        "computed_afresh": [],
        "source": {**manifest.source, "path": manifest.where},
        "format": format.name,
        "target": target,
        "about": layout.about,
        "next": layout.loading(target),
        "step": manifest.step,
        "files": list(files),
        "bytes": sum(files.values()),
        "copied": [name for name, _ in layout.siblings],
        "left_out": said(layout.omitted),
        "warnings": said(warnings),
        "inferred": list(manifest.notices.inferred),
    }
