"""Writes a set of files for each of N ranks, as verl's FSDPCheckpointManager saves FSDP2.

    model_world_size_N_rank_R.pt          model.state_dict(): DTensors of rows, and buffers
    optim_world_size_N_rank_R.pt          optimizer.state_dict()
    extra_state_world_size_N_rank_R.pt    the scheduler, and rank 0's random states for each rank
    fsdp_config.json                      the version of FSDP, and N

verl 0.7 loads only files whose names state the run's number of ranks. A pickled DTensor states the
mesh of the ranks. The pickles are those of torch 2.13; the device type and the axis name of the
mesh are the source's.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from functools import partial
from typing import Any

from ...core.checkpoint.dtypes import TORCH_NAMES
from ...core.checkpoint.inert import Foreign, Global, Size
from ...core.checkpoint.manifest import Manifest
from ...core.passes.layout import Layout, Shell
from ...core.storage.fragments import row_major
from ...errors import WrongOption, counted, literal
from ...files.torchfile import Tensor
from ...files.torchshell import Storages, shell
from ...files.torchtensors import REBUILD
from ...training.options import DIALECT, DP, Options
from ..statedict.write import BlankTensor
from .read import CONFIG, STATED, with_copies
from .write import StateDictWriter

MESHES, LAYOUTS = "torch.distributed.device_mesh", "torch.distributed._mesh_layout"
SPECS, PLACEMENTS = (
    f"torch.distributed.tensor.{module}" for module in ("_dtensor_spec", "placement_types")
)
ROWS = Foreign.instance(f"{PLACEMENTS}.Shard", dim=0)
ORDER = Foreign(Global(f"{SPECS}.ShardOrderEntry"), (0, (0,)), None, "new")


def lay_out(source: Manifest, options: Options) -> Layout:
    """Lays out the files of `--dp` ranks: each rank has its rows of parameters, and all buffers.

    The source must have files of each rank, with parameters that FSDP2 cut into rows on a mesh of
    one axis. Raises WrongOption for any other source, for optimizer states of other shapes than
    the parameters, and if `--dialect` is given.
    """
    ranks, mesh = options[DP], source.run.origin.mesh
    assert ranks is not None
    if source.format != "gathered" or mesh is None:
        raise WrongOption(
            "option-not-applicable",
            f"--dp does not apply to {source.root}: zckpt can only write it as complete files",
            hint="leave out --dp: any number of ranks can load complete files. zckpt writes rank "
            "files only if the source consists of rank files too: saved by FSDP2 and torch 2.13 on "
            "a mesh of one axis (in verl: fsdp_size=-1)",
        )
    if options[DIALECT] is not None:
        raise WrongOption(
            "option-not-applicable",
            f"--dp does not apply to --dialect {options[DIALECT]}",
            hint="leave out --dp or --dialect: with --dialect, zckpt writes only full state dicts, "
            "not a file for each rank",
        )
    writer = RanksWriter(source, options, ranks, *mesh)
    return Layout(
        writer.shells,
        [(item.name, item) for item in source.files.siblings],
        writer.omitted,
        writer.warnings,
        from_masters=True,
        about=f"files of {counted(ranks, 'rank')} with FSDP2: {writer.name('model', 0)} and others",
        loading=lambda path: f"FSDPCheckpointManager(...).load_checkpoint({literal(path)})",
        read_back=with_copies,
    )


class RanksWriter(StateDictWriter):
    """Decides the files of all ranks before the first byte is written."""

    def __init__(
        self, source: Manifest, options: Options, ranks: int, device: str, axis: str | None
    ) -> None:
        super().__init__(source, options)
        self.ranks, self.device, self.axis = ranks, device, axis
        names = {n for name, p in source.parameters.items() for n in (name, *p.aliases)}
        self.whole = {id(value) for name, value in self.weights.items() if name not in names}
        self.trees: dict[str, Any] = {"model": self.weights}
        if self.optimizes:
            self.trees["optim"] = self.files[self.file_names.optimizer]
        for key, value in self.files.get(self.file_names.extra, {}).items():
            if key != STATED:
                self.trees[key] = value
        self.omitted = [line for line in self.omitted if line.subject != CONFIG]
        if source.states.of_form("other"):
            raise WrongOption(
                "option-not-applicable",
                f"--dp does not apply to {source.root}: its optimizer has states of other shapes "
                "than the parameters",
                hint="leave out --dp: any number of ranks can load complete files",
            )

    def name(self, kind: str, rank: int) -> str:
        return f"{kind}_world_size_{self.ranks}_rank_{rank}.pt"

    def shells(self) -> Iterator[Shell]:
        """Yields every rank's files, without the tensors' bytes."""
        for rank in range(self.ranks):
            for kind, tree in self.trees.items():
                storages = Storages()
                made = partial(self._rows_of_rank, rank, storages, self._mesh(rank, storages))
                value = self.with_tensors(tree, storages, {}, made)
                yield shell(self.name(kind, rank), value, storages)
        text = json.dumps({"FSDP_version": 2, "world_size": self.ranks}, indent=4).encode()
        yield Shell.of(CONFIG, text)

    # -- DTensors in the form in which torch 2.13 pickles them

    def _rows_of_rank(
        self, rank: int, storages: Storages, mesh: Foreign, blank: BlankTensor
    ) -> Tensor | Foreign:
        """Makes the pickled DTensor of one rank's rows; rows are cut as by `torch.chunk`.

        A buffer is complete on every rank, as a plain tensor.
        """
        if id(blank) in self.whole:
            return storages.tensor(blank.dtype, blank.shape)
        count, *rest = blank.shape
        width = -(-count // self.ranks)
        own_rows = max(0, min(width, count - rank * width))
        strides = row_major(blank.shape)
        dtype = Global(f"torch.{TORCH_NAMES[blank.dtype]}")
        about = (Size(blank.shape), strides, dtype)
        spec = Foreign.instance(
            f"{SPECS}.DTensorSpec",
            mesh=mesh,
            placements=(ROWS,),
            tensor_meta=Foreign(Global(f"{SPECS}.TensorMeta"), about, None, "new"),
            shard_order=(ORDER,),
            use_strided_shard_as_shard_order=False,
            _hash=None,
        )
        cls = Global("torch.distributed.tensor.DTensor")
        layout = Foreign(Global("torch.serialization._get_layout"), ("torch.strided",))
        device = Foreign(Global("torch.device"), ("cpu",))
        arguments = (cls, dtype, blank.shape, strides, 0, layout, device, False)
        local = storages.tensor(blank.dtype, (own_rows, *rest))
        state = {"_local_tensor": local, "_spec": spec}
        rebuild = Global("torch._utils._rebuild_wrapper_subclass")
        return Foreign(Global(REBUILD), (rebuild, cls, arguments, state))

    def _mesh(self, rank: int, storages: Storages) -> Foreign:
        ranks = self.ranks
        sizes = {"shape": (ranks,), "stride": (1,)} if ranks > 1 else {"shape": (), "stride": ()}
        axis = Foreign.instance(f"{LAYOUTS}._FlatLayout", **sizes)
        places = storages.tensor("I32", (ranks,))
        storages.values_by_key[places.storage.key] = struct.pack(f"<{ranks}i", *range(ranks))
        return Foreign.instance(
            f"{MESHES}.DeviceMesh",
            _device_type=self.device,
            _layout=Foreign.instance(f"{LAYOUTS}._MeshLayout", axes=(axis,)),
            _rank_map=places,
            _mesh_dim_names=None if self.axis is None else (self.axis,),
            _root_mesh=None,
            _flatten_rank_map=tuple(range(ranks)),
            _thread_id=None,
            _flatten_mapping={},
            _dim_group_names=["0"],  # the group of all ranks
            _rank=rank,
            _coordinate_on_dim=(rank,),
            _hash=None,
        )
