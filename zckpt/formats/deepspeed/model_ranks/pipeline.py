"""Joins the stages of a pipeline into one model, by the global names of their parameters.

A stage's optimizer files have its trained parameters. Weights, frozen parameters and buffers are in
a file for each layer, under names without the layer (`PipelineModule`, DeepSpeed 0.19.8):

    layer_03-model_states.pt   fc.weight    ->   3.fc.weight
    layer_00-model_states.pt   weight       ->   tied_modules.embed.weight

The file of a tied layer does not state the layer's key (`embed` above). The key is found by bytes:
the masters of the tied layer round to the weights in the file. A layer that is a plain function has
no file, nor does a tied layer with a function of its own. Each stage that uses a tied layer has its
own copy of weights, masters and moments.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from ....core.checkpoint.entries import Entry, Key
from ....core.checkpoint.facts import FlatBufferEngine, Pipeline, layers_of
from ....core.checkpoint.manifest import Manifest, Parameter
from ....core.checkpoint.placement import STAGE, Table
from ....core.comparison.masters import begins_as
from ....core.grouping import by_key
from ....core.ranks.merge import in_order, merge
from ....core.storage import sources
from ....errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    Notice,
    UnsupportedCheckpoint,
    listed,
    warning,
)
from ....files.torchfile import TorchFile
from ...deepspeed_states.states import dictionary
from ...deepspeed_states.tensors import is_extra
from ...statedict.state_dict_search import BUFFERS
from ..layer_names import (
    TIED,
    LayerName,
    of_tied,
    prefix_of,
    spans,
    spans_with,
)

NUMBER = re.compile(r"layer_\d+", re.ASCII)
SAMPLE = 1 << 14  # elements that are compared with masters to recognize a tied layer


def joined_stages(
    stages: Sequence[Manifest], files: Mapping[int, TorchFile], step_policy: str | None
) -> Manifest:
    """Joins the pipeline stages of one tensor rank, and the files of its layers.

    `files` are the layer files by number. `step_policy` chooses a step if stages differ: "max",
    "min" or a number such as "7". Raises IncompleteCheckpoint (a layer's file is missing) and
    InconsistentCheckpoint (stages or shapes contradict each other).
    """
    layers = _Layers(stages, files)
    layers.check_places()
    whole = in_order(merge(stages, Table(STAGE), step_policy, layers.beside()))
    engine, optimizer = stages[0].run.engine, whole.state.get("optimizer") or {}
    assert isinstance(engine, FlatBufferEngine)
    weights = (whole.entries[name, "param"] for name in stages[0].parameters)
    return whole.replace(
        engine=replace(engine, dtype=next((w.dtype for w in weights), engine.dtype)),
        state={
            **whole.state,
            # listed frozen parameters are known for each stage, not for the full model
            "optimizer": {key: value for key, value in optimizer.items() if key != "members"},
        },
        pipeline=layers.pipeline,
        warnings=(*whole.notices.warnings, *layers.perhaps_tied()),
    )


def joined_stages_with_experts(stages: Sequence[Manifest], step_policy: str | None) -> Manifest:
    """Joins the stages of one tensor rank into the full model, for a pipeline with experts.

    Such a pipeline has no layer files. `step_policy` is as for `joined_stages`. Raises
    InconsistentCheckpoint if the stages' copies of a tied layer contradict each other.
    """
    # each stage has its weights in its model file (DeepSpeed 0.19.8, `_save_moe_checkpoint`)
    layers = {layer.name: layer for stage in stages for layer in layers_of(stage.run.engine)}
    engine = stages[0].run.engine
    assert isinstance(engine, FlatBufferEngine)
    return merge(stages, Table(STAGE), step_policy).replace(
        origin=replace(stages[0].run.origin, ep=max(stage.run.origin.ep or 1 for stage in stages)),
        engine=replace(engine, experts=tuple(layers.values())),
    )


class _Layers:
    """The layer files of one tensor rank, and the tied layers to which some files belong.

    files      opened layer files, by the layer's number
    tensors    each file's tensors, by their names in the file
    alike      file number -> keys of the tied layers with the file's shapes
    tied       file number -> key of its tied layer: {0: "embed", 8: "embed"}
    """

    def __init__(self, stages: Sequence[Manifest], files: Mapping[int, TorchFile]) -> None:
        places = [stage.place for stage in stages if stage.place is not None]
        self.stages, self.files, self.root = stages, files, stages[0].root
        self.count = max(files, default=-1) + 1
        from_last = stages[::-1]  # the first stage overrides the others
        self.shapes = {n: own.shape for stage in from_last for n, own in stage.parameters.items()}
        self.buffers = {name for place in places for name in place.buffers}
        self.tensors = {
            number: {k: v for k, v in dictionary(file, file.value).items() if not is_extra(k, v)}
            for number, file in files.items()
        }
        self.alike = self._keys_by_shape()
        tied = self._tied() if places[0].tied is None else places[0].tied
        self.tied = {number: tied[number] for number in files if number in tied}
        self.pipeline = Pipeline(
            [list(stage.parameters) for stage in stages],
            [list(place.buffers) for place in places],
            list(files),
            self.tied,
        )
        if lacking := sorted(of_tied(self.shapes).keys() - {*self.tied.values()}):
            raise IncompleteCheckpoint(
                "missing-file",
                f"{self.root}: no file of a layer has the weights of "
                f"{listed([f'{TIED}{key}' for key in lacking])}",
                hint="the file of a tied layer is missing; or its masters do not round to its "
                "weights: then files of two ranks may be swapped, or of another save",
                file=self.root,
            )

    # -- tied layers

    def _keys_by_shape(self) -> dict[int, list[str]]:
        """Finds the tied layers to which each layer file may belong, by the shapes of parameters.

        Returns {file number: keys of tied layers}. Files of layers that have names of their own,
        such as "3.weight", are left out.
        """
        wanted, all_names = of_tied(self.shapes), {*self.shapes, *self.buffers}
        alike: dict[int, list[str]] = {}
        for number, tensors in self.tensors.items():
            if not any(f"{number}.{inner}" in all_names for inner in tensors):
                shapes = {inner: tensor.shape for inner, tensor in tensors.items()}
                alike[number] = [k for k, own in wanted.items() if own.items() <= shapes.items()]
        return alike

    def _tied(self) -> dict[int, str]:
        """Maps the number of each tied layer's file to the layer's key, which no file states.

        The layer's masters, rounded, must equal the file's weights. Raises UnsupportedCheckpoint if
        a file fits several keys.
        """
        names = of_tied({name: name for name in self.shapes})
        masters: dict[str, Entry] = {}
        for name in chain.from_iterable(own.values() for own in names.values()):
            copies = [
                s.entries[name, "master"] for s in self.stages if (name, "master") in s.entries
            ]
            masters[name] = next((own for own in copies if not _stands_in(own)), copies[0])
        tied: dict[int, str] = {}
        for number, alike in self.alike.items():
            keys = [
                key
                for key in alike
                if all(
                    _begins_as(self._weight(number, inner, name), masters[name])
                    for inner, name in names[key].items()
                )
            ]
            if len(keys) > 1:
                raise UnsupportedCheckpoint(
                    "grid-unsupported",
                    f"{self.files[number].path} has the weights of several tied layers: "
                    f"{listed(keys)}",
                    hint="zckpt tells tied layers apart by their weights, and these are equal",
                    file=self.files[number].path,
                )
            if keys:
                tied[number] = keys[0]
        return tied

    def check_places(self) -> None:
        """Raises InconsistentCheckpoint if files of layers seem to be swapped.

        The files of tied layers are compared with the parameters of the stages that contain them.
        """

        def swapped(says: str) -> InconsistentCheckpoint:
            hint = "files of two layers may be swapped: copy all files again"
            return InconsistentCheckpoint("mixed-saves", says, hint=hint)

        # a stage that may contain layer `number` must have the tied layer of this file
        for number, key in self.tied.items():
            if not any(number in span for span in spans_with(self.pipeline, key, self.count)):
                raise swapped(
                    f"{self.files[number].path} has the weights of {TIED}{key}, but the pipeline "
                    f"stage with layer {number} does not have this tied layer"
                )
        for stage, span in zip(self.stages, spans(self.pipeline, self.count), strict=True):
            tied_numbers = [number for number in self.tied if number in span]
            uses = {self.tied[number]: number for number in reversed(tied_numbers)}
            # a stage's tied layers must have the same order in the files and in the optimizer
            for names in _groups_in_layer_order(stage):
                first = [uses[key] for key in of_tied(dict.fromkeys(names)) if key in uses]
                if first != sorted(first):
                    numbers = listed([*map(str, sorted(first))])
                    raise swapped(
                        f"{self.root}: the files of the layers {numbers} have the weights of tied "
                        "layers in another order than the optimizer"
                    )

    def perhaps_tied(self) -> Iterator[Notice]:
        """Warns of layer files that have a tied layer's shapes, but other weights.

        Such a file may be of another save.
        """
        copies = Counter(self.tied.values())
        for key in of_tied(self.shapes):
            near = spans_with(self.pipeline, key, self.count)
            if copies[key] >= len(near):  # a file for each stage that has the tied layer
                continue
            for number, alike in self.alike.items():
                is_near = any(number in span for span in near)
                if key in alike and number not in self.tied and is_near:
                    path = self.files[number].path
                    message = (
                        f"{path} has the shapes of the tied layer {key}, but other weights: zckpt "
                        "assumes that the file belongs to another layer, whose weights are frozen. "
                        "If the file belongs to the tied layer, it is from another save"
                    )
                    yield warning("frozen-inferred", message, subject=key, file=path)

    # -- the tensors in files of layers

    def beside(self) -> Manifest:
        """A manifest of all tensors in the layer files; facts about the run are the first stage's.

        Raises unless every trained parameter is in the file of its layer, with the same shape.
        """
        entries, copies = dict[Key, Entry](), list[Entry]()
        for number, tensors in self.tensors.items():
            for inner in tensors:
                entry = self._weight(number, inner, prefix_of(number, self.tied) + inner)
                if entries.setdefault(entry.key, entry) is not entry:  # a tied layer's next file
                    copies.append(entry)
        for name, shape in self.shapes.items():
            self._check_weight(name, shape, entries.get((name, "param")))
        weights = {e.parameter: e for e in entries.values() if e.parameter not in self.shapes}
        buffers = {name: None for name, entry in weights.items() if self._is_buffer(name, entry)}
        # like the manifest of one more stage, so `merge` can join the result
        return self.stages[0].replace(
            entries=entries,
            parameters={
                n: Parameter(e.shape, False) for n, e in weights.items() if n not in buffers
            },
            buffers=tuple(buffers),
            replicas=tuple(copies),
            state={"module": [entry.parameter for entry in entries.values()]},
            paths=tuple(file.path for file in self.files.values()),
            records=tuple(r for file in self.files.values() for r in file.records.values()),
        )

    def _weight(self, number: int, inner: str, name: str) -> Entry:
        tensor = self.tensors[number][inner]
        fragments = self.files[number].fragments(tensor)
        return Entry(name, "param", tensor.dtype, tensor.shape, fragments)

    def _is_buffer(self, name: str, entry: Entry) -> bool:
        if self.buffers:
            return name in self.buffers
        return entry.dtype not in ("F64", "F32", "F16", "BF16") or bool(BUFFERS.fullmatch(name))

    def _path_of(self, number: str) -> str | None:
        """The path of layer `number`'s file, beside other layer files; None if there are none."""
        for file in self.files.values():
            folder, name = os.path.split(file.path)
            return os.path.join(folder, NUMBER.sub(f"layer_{number:0>2}", name, count=1))
        return None

    def _check_weight(self, name: str, shape: tuple[int, ...], weight: Entry | None) -> None:
        if weight is None:
            number, _, inner = name.partition(".")
            is_there = number.isdecimal() and int(number) in self.files
            path = None if is_there else self._path_of(number)
            raise IncompleteCheckpoint(
                "missing-file",
                f"{self.root} lacks the {'weight' if is_there else 'file of the layer'} of {name}",
                hint=f"expected {inner} in layer_{number:0>2}-*model_states.pt",
                paths=() if path is None else (path,),
                file=self.root,
                subject=name,
            )
        if weight.shape != shape:
            raise InconsistentCheckpoint(
                "ranks-disagree",
                f"{self.root}: {name} has shape {weight.shape} in its layer's file, but {shape} in "
                "the engine's list of parameters",
                file=self.root,
                subject=name,
            )


def _begins_as(weight: Entry, master: Entry) -> bool:
    # of a file that is read in place of a lost one, only shapes are compared
    return _stands_in(weight) or _stands_in(master) or begins_as(weight, master, SAMPLE)


def _stands_in(entry: Entry) -> bool:
    """Whether some bytes of the tensor come from another rank's file, because a file is lost."""
    return any(sources.is_stand_in(fragment.extent.file) for fragment in entry.fragments)


def _groups_in_layer_order(stage: Manifest) -> Iterator[list[str]]:
    """Yields the stage's param groups whose parameters are in layer order, as lists of names.

    Parameters of tied layers count as first in that order. Groups with parameters of fewer than
    three layers are left out, because so few may be in order by accident.
    """
    for names in by_key((about.group, name) for name, about in stage.parameters.items()).values():
        numbers = (LayerName.of(name).number for name in names)
        places = [-1 if number is None else number for number in numbers]
        if len({*places}) > 2 and places == sorted(places):
            yield names
