"""Makes the document for the page of `probe-diff`, which compares two recorded runs."""

from __future__ import annotations

import os

from ..core.passes.description import VERSION, Report, said
from ..core.version import __version__
from ..errors import note
from . import summary


def document(report: Report) -> Report:
    """Makes the JSON document of which `zckpt probe-diff` renders a page, from its `report`.

    The page shows the first differences, and recorded tensors that only one run has.
    """
    big, first = report["big"], report["first"]
    result = f"{report['differing']:,} of {report['records']:,} records differ"
    differences = [
        {
            "what": f"{what}: step {event['step']}, {event['kind']} of {event['key']}",
            "a": event["what"],
            "b": event["meaning"],
        }
        for what, event in (("first big difference", big), ("first difference", first))
        if event
    ]
    alone = [
        note("not-compared", f"only {report[side]} has {name}", subject=name)
        for side in "ab"
        for name in report[f"only_{side}"]
    ]
    name = os.path.basename(os.path.abspath(report["a"]))
    about = {
        "engine": "recorded run",
        "name": name,
        "steps": f"steps {report['steps'][0]} to {report['steps'][-1]}",
    }
    return {
        "zckpt": VERSION,
        "command": "probe-diff",
        "path": report["a"],
        "version": __version__,
        "line": summary.EMPTY | about,
        "against": {
            **dict.fromkeys(("step", "histogram", "first", "worst")),
            "path": report["b"],
            "equal": not first,
            "layers": [],
            "histograms": [],
            "proof": [
                {"what": f"{report['records']:,} records", "by": "distance", "result": result}
            ],
            "not_compared": [*said(alone), *report["unmerged"]],
            "differences": differences,
        },
        "faults": [],
    }
