"""Changes the number of vocabulary rows of an embedding for the target.

Padding rows are added so that tensor ranks can share the rows evenly. So the number of rows depends
on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from ..core.checkpoint.entries import Entry
from ..core.checkpoint.manifest import Manifest
from ..core.storage.fileio import align
from ..errors import Notice, WrongOption, note
from ..naming.families.layouts import with_rows


def resized(source: Manifest, rows: Mapping[str, int]) -> Manifest:
    """Changes the number of vocabulary rows of embeddings; `rows` has the new numbers by name.

    Added rows are zeros.
    """

    def with_asked_rows(entry: Entry) -> Entry:
        count = rows.get(entry.parameter)
        if count is None or entry.shape != source.parameters[entry.parameter].shape:
            return entry
        if count == entry.shape[0]:
            return entry
        mean = tuple(with_rows(each, count) for each in entry.mean)
        return replace(with_rows(entry, count), mean=mean)

    return replace(
        source,
        parameters={
            name: replace(parameter, shape=(rows[name], *parameter.shape[1:]))
            if name in rows
            else parameter
            for name, parameter in source.parameters.items()
        },
        entries={key: with_asked_rows(entry) for key, entry in source.entries.items()},
        replicas=tuple(map(with_asked_rows, source.replicas)),
    )


def padded(root: str, name: str, used: int, given: int | None, multiple: int) -> int:
    """Rounds the number of rows of a vocabulary up to a multiple of `multiple`.

    It rounds `given` (the value of `--vocab-size`) or, without it, `used`: the rows that are not
    padding. Raises WrongOption if `given` is less than `used`.
    """
    if given is not None and given < used:
        raise WrongOption(
            "option-invalid",
            f"--vocab-size {given} is less than the {used} rows of {name} in {root} that are not "
            "padding",
            hint="give at least that number: zckpt does not make a vocabulary smaller",
        )
    return align(given or used, multiple)


def omitted_rows(source: Manifest, rows: Mapping[str, int]) -> list[Notice]:
    """Notes on vocabulary rows that a target leaves out because they are only padding.

    `rows` has the target's number of rows by parameter name.
    """
    return [
        note(
            "state-omitted",
            f"rows of {name} that only pad the vocabulary, from row {count} on",
            subject=name,
        )
        for name, count in rows.items()
        if count < source.parameters[name].shape[0]
    ]
