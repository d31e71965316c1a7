"""The first layer of each pipeline stage of a target (the bounds).

    --pp-bounds 0,5,9             bounds that the user gives
    --pp-partition uniform:9      DeepSpeed's rule: equal numbers of layers per stage
    --pp-partition parameters     DeepSpeed's rule: equal numbers of trained elements per stage
    --pp-partition type:REGEX     DeepSpeed's rule: equal numbers of layers of a class per stage
    --pp 1                        one stage has all layers

No file states the number of layers: layers that are plain functions have no file, and may follow
the last layer that has a file. No file states classes either: layers with the same parameters are
assumed to be of one class. The rules are from DeepSpeed 0.19.8, `partition_uniform` and
`partition_balanced` in runtime/utils.py. If several bounds are equally good, zckpt must choose the
same as the engine, because each stage loads only the layers that the engine gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from math import inf, prod

from ....core.checkpoint import slicing
from ....core.checkpoint.facts import Pipeline
from ....core.checkpoint.manifest import Manifest
from ....core.grouping import by_key
from ....errors import Notice, WrongOption, warning
from ....training.options import PP, Options
from ...deepspeed_states.options import PP_BOUNDS, PP_PARTITION
from ..layer_names import LayerName, layers_with, of_tied, untied_layers, uses_of_files

STAGES = (PP, PP_BOUNDS, PP_PARTITION)
LAST = "the last bound is the number of all layers, which include plain functions"


def is_cut(pp: int, options: Options) -> bool:
    """Whether `options` ask for other pipeline stages than the `pp` stages of the source."""
    is_given = options[PP_BOUNDS] is not None or options[PP_PARTITION] is not None
    return is_given or options[PP] not in (None, pp)


def bounds_of(model: Manifest, pipeline: Pipeline, options: Options) -> tuple[int, ...]:
    """The bounds of the target's stages: the first layer of each, then the number of all layers.

    (0, 5, 9) means two stages with the layers 0 to 4 and 5 to 8. Raises WrongOption if the options
    do not fit the source's `pipeline`, or do not determine the bounds.
    """
    bounds, method = options[PP_BOUNDS], options[PP_PARTITION]
    layers, stages = pipeline.layers, options[PP] or len(pipeline.parameters)
    count, files = max(layers) + 1, f"{model.root} has files of the layers {ranges(layers)}"
    if bounds is not None:
        _check_given(bounds, layers, files, options)
        return tuple(bounds)
    if stages == 1:
        return 0, count
    if method is None:
        raise _unknown_bounds(
            f"--pp {stages} needs the first layer of each stage, which no file states; {files}",
            f"such as --pp-bounds {_text(uniform(count, min(stages, count)))}",
        )
    name, _, about = method.partition(":")
    if name == "type":
        return _by_class(model, pipeline, stages, method)
    if about and int(about) < count:
        raise WrongOption(
            "option-invalid",
            f"--pp-partition {method}: {files}",
            hint="the number after the colon counts all layers, which include plain functions",
        )
    if name == "uniform":
        return uniform(int(about or count), stages)
    return balanced(_weights(model, pipeline, files), stages)


def assumed(model: Manifest, bounds: Sequence[int], options: Options) -> list[Notice]:
    """With `--pp-partition`: a warning that states the bounds and the assumptions behind them.

    zckpt assumes the number of layers. For `type:REGEX` it also assumes which layers have a class
    whose name matches REGEX.
    """
    if (method := options[PP_PARTITION]) is None:
        return []
    message = (
        f"--pp-partition {method}: the stages' bounds are {_text(bounds)}, if the program has "
        f"{bounds[-1]} layers (which include plain functions)"
    )
    if alike := layers_alike(model) if method.startswith("type:") else []:
        message += (
            f", and if {method} names the class of the layers {ranges(alike)}, which have equal "
            "parameters"
        )
    return [warning("place-inferred", message, subject=PP_PARTITION.flag)]


def refuse_without_stages(root: str, options: Options) -> None:
    """Raises WrongOption for a pipeline option if the source is no pipeline."""
    for option in STAGES:
        if options[option] is not None:
            raise WrongOption(
                "option-not-applicable",
                f"{option.flag} does not apply to {root}, which is not a pipeline",
                hint="leave it out; or give --like RUN, a pipeline of the same model",
            )


def _check_given(
    bounds: Sequence[int], layers: Sequence[int], files: str, options: Options
) -> None:
    if options[PP_PARTITION] is not None:
        raise WrongOption(
            "options-conflict",
            "--pp-bounds and --pp-partition both say where stages begin",
            hint="leave one out",
        )
    says = f"--pp-bounds {_text(bounds)}"
    if options[PP] not in (None, len(bounds) - 1):
        raise WrongOption(
            "stages-do-not-fit",
            f"{says} define {len(bounds) - 1} stages, but --pp asks for {options[PP]}",
            hint="give the first layer of each stage, and the number of all layers at the end",
        )
    if bounds[-1] <= max(layers):
        raise WrongOption(
            "stages-do-not-fit", f"{says} end before layer {max(layers)}; {files}", hint=LAST
        )


def _unknown_bounds(says: str, example: str = "with --pp-bounds") -> WrongOption:
    """The error for bounds that neither the options nor the files show.

    `says` is the message. `example` completes the hint: "give the first layer of each stage ...
    {example}".
    """
    return WrongOption(
        "stages-do-not-fit",
        says,
        hint="give the first layer of each stage and the number of all layers (which include plain "
        f"functions), {example}; your program prints the layers of each stage at its start",
    )


def _text(bounds: Sequence[int]) -> str:
    return ",".join(map(str, bounds))


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as text with ranges: 0, 1, 3 to 7."""
    runs = groupby(enumerate(numbers), lambda each: each[1] - each[0])
    parts = [[number for _, number in run] for _, run in runs]
    return ", ".join(
        f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts
    )


# -- what layers have


def _weights(model: Manifest, pipeline: Pipeline, files: str) -> list[int]:
    """The number of trained elements in each layer, by which stages are balanced.

    A tied layer counts at each of its uses. Raises WrongOption if no file shows all these uses.
    """
    uses = uses_of_files(pipeline)
    hidden = sorted(key for key in of_tied(model.parameters) if len(uses.get(key, ())) < 2)
    if hidden:
        raise _unknown_bounds(
            f"--pp-partition parameters counts the tied layer {hidden[0]} wherever it is used, but "
            f"no file shows all its uses; {files}"
        )
    counts = [0] * (max(pipeline.layers) + 1)
    for name, parameter in model.parameters.items():
        if parameter.trainable:
            for number in layers_with(name, uses):
                counts[number] += prod(parameter.shape)
    return counts


def layers_alike(model: Manifest) -> list[int]:
    """The numbers of the layers that are assumed to be of one class.

    Layers with the same parameter names and shapes form a set. The set with the most layers is
    chosen; between sets of equal size, the set whose layers have more parameters. The result is
    empty if this does not decide either.
    """
    names = ((LayerName.of(name), own.shape) for name, own in model.parameters.items())
    kinds = by_key((n.number, (n.inner, shape)) for n, shape in names if n.number is not None)
    members = by_key((tuple(sorted(kind)), layer) for layer, kind in sorted(kinds.items()))
    # an embedding and an output layer may be alike too
    sizes = {kind: (len(layers), len(kind)) for kind, layers in members.items()}
    largest = [kind for kind, size in sizes.items() if size == max(sizes.values())]
    return members[largest[0]] if len(largest) == 1 else []


def _by_class(model: Manifest, pipeline: Pipeline, stages: int, method: str) -> tuple[int, ...]:
    """Bounds that share out the layers of one class evenly over the stages (`type:REGEX`).

    No file states classes, so zckpt assumes that layers with equal parameters are this class.
    Raises WrongOption if the source's stages contradict this, or if such layers are too few.
    """
    alike = layers_alike(model)
    says = f"--pp-partition {method} depends on the classes of layers, which no file states"
    if len(alike) < stages:
        raise _unknown_bounds(
            f"{says}, and {model.root} does not have {stages} layers with equal parameters"
        )
    weights = [int(number in alike) for number in range(max(pipeline.layers) + 1)]
    before, after = (balanced(weights, n) for n in (len(pipeline.parameters), stages))
    for names, first, stop in zip(pipeline.parameters, before, before[1:], strict=False):
        numbers = untied_layers(names)
        if numbers and not first <= min(numbers) <= max(numbers) < stop:
            raise WrongOption(
                "stages-do-not-fit",
                f"{says}. zckpt assumes that the layers {ranges(alike)}, which have equal "
                f"parameters, are the layers of this class. Then the stages of {model.root} would "
                f"begin at layers {_text(before[:-1])}, but they do not begin there",
                hint="if the saved run was cut by another rule, and only the new run uses this "
                f"--pp-partition, give --pp-bounds {_text(after)}; your program prints the layers "
                "of each stage at its start",
            )
    return after


# -- DeepSpeed's rules


def uniform(layers: int, stages: int) -> tuple[int, ...]:
    """Bounds with equal numbers of layers per stage.

    If the layers cannot be divided evenly, the first stages have one layer more.
    """
    return tuple(accumulate(slicing.dealt(layers, stages), initial=0))


def balanced(weights: Sequence[int], stages: int) -> tuple[int, ...]:
    """Bounds that give all stages about the same sum of `weights`, by DeepSpeed's rule.

    `weights` has a number for each layer, such as its number of trained elements. DeepSpeed's
    result, and so this one, is not always the best partition of all layers.
    """
    count = len(weights)
    if count <= stages:
        return uniform(count, stages)
    sums = [0, *accumulate(weights)]
    # by the number of layers so far: the largest and smallest sum, and the bounds
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0, inf, (0,))}
    for _ in range(stages):  # of equally good partitions, the last one is kept
        longer = {}
        for stop in range(1, count + 1):
            candidates = [
                (max(most, size), min(least, size), (*bounds, stop))
                for start, (most, least, bounds) in best.items()
                if start < stop
                for size in [sums[stop] - sums[start]]
            ]
            if candidates:
                longer[stop] = min(reversed(candidates), key=lambda each: each[0] - each[1])
        best = longer
    return best[count][2]
