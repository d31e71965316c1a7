"""Keys of dictionaries that were numbers in one checkpoint and are strings in another.

torch.distributed.checkpoint turns all keys into strings: its files do not show whether `0.9` was a
number. When a program loads such files, torch puts the values under the keys of the program's own
state dict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from .inert import PLAIN, TensorName, inside, map_values
from .manifest import Manifest

OF_TEXTS = "dcp"  # also the origin of a universal checkpoint that was converted from it
"""The format of torch.distributed.checkpoint, in which all keys of dictionaries are strings."""
_DICTIONARIES = (dict, OrderedDict)


def has_texts_alone(manifest: Manifest) -> bool:
    return manifest.run.origin.format == OF_TEXTS


def in_doubt(value: Any, path: str) -> Iterator[str]:
    """Yields the paths of dictionaries whose keys all look like numbers, such as "0.9".

    torch.distributed.checkpoint saves every key as a string. So these keys may have been numbers.
    """
    if type(value) in _DICTIONARIES and value and all(map(_is_text_of_number, value)):
        yield path
    items: list[tuple[Any, Any]] = []
    map_values(value, lambda item, key: items.append((key, item)))
    for key, item in items:
        yield from in_doubt(item, inside(path, key))


def _is_text_of_number(key: Any) -> bool:
    for kind in (int, float):
        try:
            if isinstance(key, str) and len(key) < 100 and str(kind(key)) == key:
                return True
        except ValueError:
            pass
    return False


def matched(a: Manifest, b: Manifest) -> tuple[Manifest, Manifest]:
    """Makes the keys of two manifests comparable: if one has only strings, both get strings.

    Returns both manifests.
    """
    if has_texts_alone(a) or has_texts_alone(b):
        return with_texts(a), with_texts(b)
    return a, b


def with_texts(manifest: Manifest) -> Manifest:
    """Converts all dictionary keys in a manifest's state and param groups to strings.

    A dictionary keeps its keys if two of them would become equal. The name of a tensor in the state
    is the path of its keys, so the tensor may be renamed.
    """
    names: dict[str, str] = {}

    def changed(value: Any, path: str, is_below: bool = False) -> Any:
        if isinstance(value, TensorName) and is_below:
            return TensorName(names.setdefault(value.name, path))
        if type(value) not in _DICTIONARIES:
            return map_values(value, lambda item, key: changed(item, inside(path, key), is_below))
        texts = [*dict.fromkeys(map(str, value))]
        keys = texts if len(texts) == len(value) else [*value]
        pairs = zip(keys, value.values(), strict=True)
        return type(value)([(key, under(key, item, path, is_below)) for key, item in pairs])

    def under(key: Any, item: Any, path: str, is_below: bool) -> Any:
        if type(item) in PLAIN:
            return item
        return changed(item, inside(path, key), is_below or _is_text_of_number(str(key)))

    state = {key: changed(value, key) for key, value in manifest.state_with_states.items()}
    groups = manifest.groups and tuple(changed(list(manifest.groups), "groups"))
    entries = [
        replace(entry, parameter=names[entry.parameter])
        if entry.slot == "state" and entry.parameter in names
        else entry
        for entry in (*manifest.entries.values(), *manifest.replicas)
    ]
    count = len(manifest.entries)
    return replace(
        manifest.with_state(state),
        groups=groups,
        entries={entry.key: entry for entry in entries[:count]},
        replicas=tuple(entries[count:]),
    )
