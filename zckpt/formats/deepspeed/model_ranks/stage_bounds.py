"""At which layers do the stages of a pipeline begin?

    --pp-bounds 0,5,9             the user says it
    --pp-partition uniform:9      DeepSpeed's rule: as many layers for each stage
    --pp 1                        one stage has all layers

No file states how many layers there are. Functions have no file, so some may follow the last layer
that has one. The rule is that of DeepSpeed 0.19.8, `partition_uniform` in runtime/utils.py: the
engine cuts its own layers, and a stage loads only what it has itself.

Turned down: `parameters` and `type:REGEX`, DeepSpeed's other rules. No file states the classes of
layers, nor where functions use a tied one. The program prints the bounds that these rules give.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ....errors import WrongOption
from ....training.options import PP, Options
from ...deepspeed_states.options import PP_BOUNDS, PP_PARTITION
from .layer_names import tied_key, untied_layers

STAGES = (PP, PP_BOUNDS, PP_PARTITION)

Uses = Mapping[str, set[int]]  # numbers of the layers at which a tied layer is used, by its key


def bounds_of(root: str, layers: Sequence[int], before: int, options: Options) -> tuple[int, ...]:
    """The first layer of each stage, then the number of all layers.

    `layers` are those that have files, and the source has `before` stages. Raises WrongOption if
    the options do not fit, or do not say it.
    """
    bounds, method = options[PP_BOUNDS], options[PP_PARTITION]
    stages = options[PP] or before
    count = max(layers) + 1
    if bounds is not None:
        return _given(root, bounds, layers, options)
    if stages == 1:
        return 0, count
    if method is None:
        example = ",".join(map(str, uniform(count, min(stages, count))))
        raise WrongOption(
            f"--pp {stages} needs the bounds of its stages, which no file states; "
            f"{_files(root, layers)}",
            hint="give the first layer of each stage and the number of all layers, functions "
            f"included, such as --pp-bounds {example}; your program prints the layers of each "
            "stage at its start",
        )
    about = method.partition(":")[2]
    if about and int(about) < count:
        raise WrongOption(
            f"--pp-partition {method}: {_files(root, layers)}",
            hint="the number is that of all layers, functions included",
        )
    return uniform(int(about or count), stages)


def refuse_without_stages(root: str, options: Options) -> None:
    """Raises WrongOption for an option of pipelines, if the source is none."""
    for option in STAGES:
        if options[option] is not None:
            raise WrongOption(
                f"{option.flag} does not apply to {root}, which is not a pipeline",
                hint="leave it out; or give --like RUN, a pipeline of the same model",
            )


def _given(
    root: str, bounds: Sequence[int], layers: Sequence[int], options: Options
) -> tuple[int, ...]:
    text = ",".join(map(str, bounds))
    if options[PP_PARTITION] is not None:
        raise WrongOption(
            "--pp-bounds and --pp-partition both say where stages begin", hint="leave one out"
        )
    if options[PP] not in (None, len(bounds) - 1):
        raise WrongOption(
            f"--pp-bounds {text} are those of {len(bounds) - 1} stages, not of --pp {options[PP]}",
            hint="give the first layer of each stage, and the number of all layers at the end",
        )
    if bounds[-1] <= max(layers):
        raise WrongOption(
            f"--pp-bounds {text} end before layer {max(layers)}; {_files(root, layers)}",
            hint="the last bound is the number of all layers, functions included",
        )
    return tuple(bounds)


def _files(root: str, layers: Sequence[int]) -> str:
    return f"{root} has files of the layers {ranges(layers)}"


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers in words: 0, 1, 3 to 7."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    words = [
        f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts
    ]
    return ", ".join(words)


def stage_spans(stages: Sequence[Sequence[str]], count: int) -> Iterator[tuple[int, int]]:
    """The layers [start, stop) that a stage of the source may have, as others show theirs.

    `stages` are the names of each one's parameters, and `count` is the number of layers.
    """
    shown = [untied_layers(names) for names in stages]
    for number in range(len(stages)):
        before = [layer for each in shown[:number] for layer in each]
        after = [layer for each in shown[number + 1 :] for layer in each]
        yield max(before, default=-1) + 1, min(after, default=count)


def layers_with(name: str, uses: Uses) -> Sequence[int]:
    """The layers that have a parameter."""
    key = tied_key(name)
    return untied_layers([name]) if key is None else sorted(uses.get(key, ()))


def uniform(layers: int, stages: int) -> tuple[int, ...]:
    """As many layers for each stage; the first stages have one more."""
    if layers <= stages:
        return tuple(min(stage, layers) for stage in range(stages + 1))
    width, more = divmod(layers, stages)
    return tuple(stage * width + min(stage, more) for stage in range(stages + 1))
