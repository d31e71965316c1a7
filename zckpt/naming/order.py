"""Sorts parameters in the order of the module, for a source that does not state the order.

DeepSpeed's flat buffers store parameters without names, in the order in which the program passes
them to the optimizer. Files in another order would load into the wrong weights. ONNX Runtime stores
weights by name, without an order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from shlex import quote

from msgspec.structs import replace

from ..core.checkpoint.facts import StateDictEngine
from ..core.checkpoint.manifest import Manifest
from ..errors import MissingData, WrongOption, listed
from .names import RENAME_HINT


def is_known(manifest: Manifest) -> bool:
    """Whether the manifest lists the parameters in the same order as the model's module."""
    return manifest.run.engine is None or manifest.run.engine.ordered is not False


def need_order(manifest: Manifest) -> None:
    """Raises MissingData if the manifest does not list the parameters in the module's order."""
    if not is_known(manifest):
        raise MissingData(
            "names-needed",
            f"{manifest.root} stores weights by name, without the order of the module's "
            "parameters, and this target is loaded by that order",
            hint="give it with --param-names FILE (the parameters of the new optimizer, one per "
            "line, group by group), or write --to deepspeed-universal, which is loaded by name",
            file=manifest.root,
        )


def in_order_of(manifest: Manifest, names: Sequence[str]) -> Manifest:
    """Sorts a manifest's parameters in the order of `names`.

    Raises WrongOption if `names` lacks a trainable parameter, or has a name that is unknown or
    occurs twice. Only a pipeline's tied parameters may occur more than once.
    """
    positions: dict[str, int] = {}
    for position, name in enumerate(names):
        positions.setdefault(name, position)
    tied = {entry.parameter for entry in manifest.replicas} if manifest.run.pipeline else set()
    if (place := manifest.rank_manifests[0].place) is not None:
        stages = Counter(n for own in manifest.ranks[:: place.grid.tp] for n in own.parameters)
        tied |= {name for name, count in stages.items() if count > 1}
    every = [item for own in manifest.rank_manifests for item in own.parameters.items()]
    trained = dict.fromkeys(name for name, parameter in every if parameter.trainable)
    lacking = [name for name in trained if name not in positions]
    held = ((*own.parameters, *own.buffers) for own in manifest.with_models)
    known_names = {*chain.from_iterable(held), *manifest.owners}
    unknown = [name for name in names if name not in known_names]
    again = [name for position, name in enumerate(names) if positions[name] != position]
    twice = [name for name in again if name not in tied]
    wrong = [
        complaint.format(listed(wrong_names, 4))
        for complaint, wrong_names in (
            ("does not name {} of the source", lacking),
            ("names {}, which the source does not hold", unknown),
            ("names {} twice", twice),
        )
        if wrong_names
    ]
    if wrong:
        hint = RENAME_HINT if lacking and unknown else ""
        raise WrongOption("names-do-not-fit", f"--param-names {'; it '.join(wrong)}", hint=hint)
    engine = manifest.run.engine
    guessed = isinstance(engine, StateDictEngine) and engine.guessed
    buffers = [name for name, _ in every if name not in positions]
    if guessed and buffers and any(name not in trained for name in names):  # a list of all
        raise WrongOption(
            "names-do-not-fit",
            "--param-names lists frozen parameters, but not all tensors: zckpt cannot tell whether "
            "the others are buffers",
            hint="list only the optimizer's parameters; if the unlisted tensors are buffers, add "
            + " ".join(f"--buffers {quote(name)}" for name in buffers[:4]),
        )
    return _ordered(manifest.map_ranks(lambda rank: _ordered(rank, positions)), positions)


def _ordered(manifest: Manifest, positions: Mapping[str, int]) -> Manifest:
    parameters, engine = manifest.parameters, manifest.run.engine

    def position_of(name: str) -> tuple[bool, int]:
        parameter = parameters.get(name)
        return parameter is None or not parameter.trainable, positions.get(name, len(positions))

    order = sorted(parameters, key=position_of)
    entries = sorted(manifest.entries.values(), key=lambda entry: position_of(entry.parameter))
    return manifest.replace(
        parameters={name: parameters[name] for name in order},
        entries={entry.key: entry for entry in entries},
        engine=None if engine is None else replace(engine, ordered=True),
    )
