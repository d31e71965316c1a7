"""The section `steps` of a report: every stored step, and the optimizer groups side by side."""

from __future__ import annotations

from collections import Counter

from ..core.checkpoint.inert import plain_group
from ..core.checkpoint.manifest import Manifest
from ..core.passes.description import Report
from ..errors import counted
from ..judging.damaged_source import Found, file_in


def section(checkpoint: Found) -> Report:
    """Makes the section `steps`: all stored steps, and the hyper-parameters of all groups.

    Each place that stores a step has a key `agrees`. It is True if the step is that of the
    checkpoint, and None for a counter of an engine or a trainer, which is not the optimizer's step.
    """
    manifest = checkpoint.known
    owners = Counter(item.step for item in manifest.parameters.values() if item.trainable)
    true = manifest.step
    if true is None and owners:
        true = owners.most_common(1)[0][0]
    alone = sum(each.truth for each in manifest.run.steps) == 1
    places_of_steps: list[tuple[str, float | int, bool, int | None]]
    places_of_steps = [(where, step, True, None) for where, step in checkpoint.stated]
    places_of_steps += [
        (
            sighting.where,
            sighting.step,
            sighting.truth,
            owners.get(sighting.step) if sighting.truth and alone else None,
        )
        for sighting in manifest.run.steps
        if not (checkpoint.stated and sighting.truth)
    ]
    places = [
        {
            "file": _named(checkpoint, where),
            "where": where,
            "step": step,
            "agrees": step == true if is_truth else None,
            "parameters": parameters,
        }
        for where, step, is_truth, parameters in places_of_steps
    ]
    groups = [plain_group(group) for group in manifest.groups or ()]
    count = Counter(item.group for item in manifest.parameters.values() if item.trainable)
    keys = dict.fromkeys(key for group in groups for key in group)
    return {
        "true": true,
        "places": places,
        "groups": [
            {"number": number, "parameters": count[number], "values": group}
            for number, group in enumerate(groups)
        ],
        "differing": [
            key
            for key in keys
            if any(key not in group or group[key] != groups[0].get(key) for group in groups)
        ],
    }


def _named(found: Found, where: str) -> str | None:
    path = file_in(where, found.path)
    return None if path is None else found.name(path)


def agreeing(manifest: Manifest, stated_steps: tuple[tuple[str, float | int], ...]) -> str:
    """Part of a sentence: each stored step, and how often it is stored: "500 in all 8 places".

    `stated_steps` are pairs (place, step). If it is empty, the manifest's steps are used.
    """
    steps = [step for _, step in stated_steps] or [
        each.step for each in manifest.run.steps if each.truth
    ]
    if not steps:
        return "no step is stored"
    counts = Counter(steps).most_common()
    if len(counts) == 1:
        places = {1: "the one place", 2: "both places"}.get(len(steps), f"all {len(steps)} places")
        return f"{counts[0][0]:.15g} in {places}"
    return ", ".join(f"{step:.15g} in {counted(count, 'place')}" for step, count in counts)
