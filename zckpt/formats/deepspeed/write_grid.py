"""A DeepSpeed directory of several model ranks for another data-parallel size, at the same grid.

Each model rank is written as a checkpoint by itself. Files of layers are copied unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ...core.manifest import Manifest
from ...core.staging import Layout, Shell
from ...errors import UnsupportedCheckpoint, WrongOption, counted, literal
from ...training import objects
from ...training.options import ALLOW_OBJECT, DP, Options
from ..deepspeed_states import reports
from ..deepspeed_states.directories import TagDirectory
from ..deepspeed_states.hyper import check_states
from ..deepspeed_states.model_files import model_files
from ..deepspeed_states.target import DeepSpeedTarget
from . import elastic
from .apart import ModelGrid, layer_siblings, open_apart, stacked
from .files import locate, rank_files, recovery_scripts
from .grid import grid_files
from .optimizer_files import optimizer_files

TAKEN = frozenset({DP.name, ALLOW_OBJECT.name})


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files of the target; `source` has the names of `apart.stacked`.

    Raises WrongOption for options other than --dp, and what `write.lay_out` raises.
    """
    others = [option.flag for option, _ in options.given if option.name not in TAKEN]
    if others:
        raise WrongOption(
            f"{others[0]} does not apply to {source.root}, which was saved by several model ranks",
            hint="such a run is written for another --dp alone; `zckpt convert --to universal` "
            "takes the whole model",
        )
    tag = str(source.source["tag"])
    files = grid_files(TagDirectory(source.root, tag, None))
    grid = ModelGrid.of(files, source)
    apart = open_apart(TagDirectory(source.root, tag, None), files.ranks, grid, None)
    targets = [_target(manifest, options) for manifest in apart]
    first = targets[0]
    if any(map(elastic.is_elastic, targets)):
        raise UnsupportedCheckpoint(
            f"{source.root} is an elastic checkpoint of several model ranks, which zckpt does not "
            "write yet"
        )
    for target in targets:
        slots = {slot for buffer in target.buffers for slot in buffer.slots}
        check_states(target.engine, target.source, slots)

    def shells() -> Iterator[Shell]:
        pointer = tag.encode()
        yield Shell("latest", len(pointer), ((0, pointer),))
        for number, target in enumerate(targets):
            for shell in (*optimizer_files(target, False), *model_files(target, derives=True)):
                name = shell.name.replace("mp_rank_00", f"mp_rank_{number:02d}")
                yield Shell(name, shell.size, shell.parts)

    def read_back(path: str) -> Manifest:
        """Files of layers are not there yet."""
        directory = locate(path, tag)
        names = sorted(os.listdir(directory.path))
        written = [rank_files(directory, names, number) for number in range(len(targets))]
        return stacked(open_apart(directory, written, grid, None))

    siblings = [*first.take_siblings(), *layer_siblings(files, tag)]
    left_out = dict.fromkeys(line for target in targets for line in target.left_out)
    return Layout(
        shells,
        siblings,
        [*left_out, *recovery_scripts(source.root)],
        list(dict.fromkeys([*source.warnings, *reports.of_weights(first)])),
        about=f"a DeepSpeed run of {counted(first.dp, 'data-parallel rank')}, pp {files.pp}, tp "
        f"{files.tp}, ZeRO stage {first.engine.stage}, tag {tag}",
        loading=lambda path: f"model_engine.load_checkpoint({literal(path)})",
        read_back=read_back,
    )


def _target(manifest: Manifest, options: Options) -> DeepSpeedTarget:
    """The target of one model rank, without objects that its pickles may not name."""
    from .. import engine_objects

    admitted = options[ALLOW_OBJECT]
    return DeepSpeedTarget(objects.without_others(manifest, engine_objects(), admitted), options)
