"""The order of the module's parameters, where a source does not tell it.

DeepSpeed's flat buffers hold parameters in the order in which the program gives them to the
optimizer, without names: files in another order would load into the wrong weights. ONNX Runtime
keeps weights by name, and no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..core.manifest import Manifest
from ..errors import MissingData, WrongOption, listed
from .names import RENAME


def is_known(manifest: Manifest) -> bool:
    """Whether the parameters stand in the order in which the module has them."""
    return (manifest.state.get("engine") or {}).get("ordered") is not False


def need_order(manifest: Manifest) -> None:
    """Raises MissingData where the order is not known."""
    if not is_known(manifest):
        raise MissingData(
            f"{manifest.root} keeps weights by name, not in the order of the module's parameters, "
            "by which this target is loaded",
            hint="give it with --param-names FILE (the names of model.named_parameters(), one per "
            "line), or write --to deepspeed-universal, which is loaded by name",
        )


def in_order_of(manifest: Manifest, names: Sequence[str]) -> Manifest:
    """The same with its parameters in the order of `names`.

    Of a source that does not tell them apart, frozen weights that are not named are buffers.
    Raises WrongOption unless all trainable parameters are named, and nothing else than weights of
    the source.
    """
    places = {name: place for place, name in enumerate(names)}
    trained = [name for name, held in manifest.parameters.items() if held.trainable]
    lacking = [name for name in trained if name not in places]
    aliases = {alias for held in manifest.parameters.values() for alias in held.aliases}
    known = {*manifest.parameters, *manifest.buffers, *aliases}
    unknown = [name for name in names if name not in known]
    twice = [name for place, name in enumerate(names) if places[name] != place]
    wrong = [
        what.format(listed(told, 4))
        for what, told in (
            ("does not name {} of the source", lacking),
            ("names {}, which the source does not hold", unknown),
            ("names {} twice", twice),
        )
        if told
    ]
    if wrong:
        hint = RENAME if lacking and unknown else ""
        raise WrongOption(f"--param-names {'; it '.join(wrong)}", hint=hint)

    def place(name: str) -> tuple[bool, int]:
        held = manifest.parameters.get(name)
        return held is None or not held.trainable, places.get(name, len(places))

    # a list that names more than the optimizer's parameters names all, and buffers are the rest
    guessed = (manifest.state.get("engine") or {}).get("guessed")
    tells = guessed and any(name not in trained for name in names)
    buffers = [
        name
        for name, held in manifest.parameters.items()
        if not (held.trainable or name in places) and (tells or not is_known(manifest))
    ]
    order = [name for name in sorted(manifest.parameters, key=place) if name not in buffers]
    entries = sorted(manifest.entries.values(), key=lambda entry: place(entry.parameter))
    state = dict(manifest.state)
    if isinstance(state.get("engine"), dict):
        state["engine"] = {**state["engine"], "ordered": True}
    return replace(
        manifest,
        parameters={name: manifest.parameters[name] for name in order},
        buffers=(*manifest.buffers, *buffers),
        entries={entry.name: entry for entry in entries},
        state=state,
    )
