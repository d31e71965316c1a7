"""Whose is a file, by the name under which it was saved?

torch.save gives the folder in its zip the name of the file, without the ending (torch 1.6 to 2.13).
So a file that was renamed or copied still states whose it is. It states nothing if it was saved
into a buffer (torch calls the folder `archive`), under a name of another form that no file beside
it has, or before torch 1.6.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from msgspec import Struct

from ..errors import InconsistentCheckpoint, Notice, note
from . import sources

Place = tuple[Hashable, tuple[int, ...]]
"""What the name of a rank's file states: the form of the name, and the numbers in it.

A number that only one of two names has, behind the others, is not compared.
"""


class SavedName(Struct, frozen=True):
    """The name of a rank's file: the `place` that it has now, and the one as it was saved.

    `saved_as` is the name as it was saved, with the ending of today's. `stated` is None if the file
    states no place of the same form, and not the name of another file.
    """

    path: str
    saved_as: str
    place: Place
    stated: Place | None

    @property
    def is_other(self) -> bool:
        """Whether the file was saved as that of another rank."""
        if self.stated is None:
            return False
        numbers = zip(self.stated[1], self.place[1], strict=False)
        return self.stated[0] != self.place[0] or any(a != b for a, b in numbers)


def saved_names(
    folders: Mapping[str, str | None],
    place_of: Callable[[str], Place | None],
    beside: Iterable[str] = (),
) -> list[SavedName]:
    """The names of all files of a checkpoint; `folders` are those in the zips: None without a zip.

    `place_of` gives the place of a name, and None for one that is no rank's. `beside` are names of
    further files in the same directory.
    """
    stems = {os.path.splitext(os.path.basename(name))[0] for name in (*folders, *beside)}
    names = []
    for path, folder in folders.items():
        name = os.path.basename(path)
        place, saved_as = place_of(name), f"{folder}{os.path.splitext(name)[1]}"
        if place is None:
            continue
        stated = None if folder is None or sources.is_stand_in(path) else place_of(saved_as)
        if stated is not None and stated[0] != place[0] and folder not in stems:
            stated = None
        names.append(SavedName(path, saved_as, place, stated))
    return names


def refuse_others(names: Sequence[SavedName], what: str = "ranks") -> None:
    """Raises InconsistentCheckpoint if a file was saved as that of another one of `what`."""
    for name in names:
        if name.is_other:
            raise InconsistentCheckpoint(
                "swapped-files",
                f"{name.path} was saved as {name.saved_as}: files of two {what} are swapped, or "
                "one was renamed or copied",
                hint="copy all files again; if this one was only renamed, give it its own name "
                f"again ({name.saved_as})",
                file=name.path,
            )


def nameless(names: Sequence[SavedName]) -> list[Notice]:
    """A note on files of ranks that state no place: for these, `refuse_others` says nothing."""
    count = sum(name.stated is None for name in names)
    if not count:
        return []
    return [
        note(
            "saved-name-unknown",
            f"{count} of {len(names)} rank files state no name of their own: if one of these was "
            "swapped or copied, no name shows it",
        )
    ]
