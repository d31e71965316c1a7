"""Loads a checkpoint into a DeepSpeed engine with another number of ranks, without a copy on disk.

1. each rank reads the metadata of the source, and writes the engine's files without tensor data
   (shells: headers, and holes where tensors go) into a temporary directory
2. rank 0 makes the checks that `reshard` makes before it writes; an error ends the load everywhere
3. the engine loads from this directory; each file that it asks for is filled in memory
4. after each file, the ranks check together that the source's bytes have the right checksums

The engine first reads the model's file. Its own state does not change before it asks for a second
file, or for the model's file again. So an error before that leaves the engine as it was.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from msgspec import Struct

from .. import api
from ..copying.assembling import Assembler
from ..core.checkpoint.manifest import Manifest
from ..core.passes import plan
from ..core.passes.layout import Layout
from ..core.passes.pieces import ElementReader
from ..core.passes.resources import uncollected
from ..core.passes.streaming import chunk_size, reading
from ..core.storage.checksum import crc32
from ..core.storage.records import mark_of
from ..core.storage.sources import unchanged
from ..errors import WrongOption, ZckptError, log
from ..processes.launcher import Launch, joined
from ..processes.ranks import Ranks, Told, received, sent
from ..processes.sharing import Processes
from . import temporary
from .agreeing import Agreement
from .filled import FilledFile
from .support import refuse_engine, refuse_files

LOG = logging.getLogger("zckpt")
ARGUMENTS: dict[str, Any] = {
    "load_module_strict": True,
    "load_optimizer_states": True,
    "load_lr_scheduler_states": True,
    "load_module_only": False,
    "custom_load_fn": None,
}
"""Arguments of DeepSpeed's `load_checkpoint` beside path and tag, with their defaults (0.19.8)."""
MEMORY = 64 << 20  # bytes, for buffers
MODEL, OPTIMIZER = "_model_states.pt", "_optim_states.pt"
TOUCHED = (
    "the engine has loaded only a part of the checkpoint: end this program, do not train with it"
)


def load(
    engine: Any,
    source: str,
    tag: str | None,
    given: dict[str, Any],
    *,
    is_sparing: bool = False,
    **words: Any,
) -> tuple[str | None, Any]:
    """Loads the checkpoint at `source` into an engine, as `zckpt.deepspeed.load_checkpoint`.

    `given` are arguments of the engine's own loader, whose result is returned, with the path of the
    source. `words` are arguments of `zckpt.reshard`. With `is_sparing`, no checksums are compared.
    Raises the errors of `zckpt.deepspeed.load_checkpoint`, in all ranks.
    """
    given = ARGUMENTS | given
    refuse_engine(engine, source, given["load_optimizer_states"])
    words = words_for(engine, words)
    launch = joined() or Launch(0, 1)
    failure: Exception | None = None
    told: Told | None = None
    result: tuple[str | None, Any] = None, None
    try:
        with ExitStack() as stack:
            processes = stack.enter_context(Processes(launch)) if launch.size > 1 else None
            stack.enter_context(api.telling())
            one = Load(Ranks(processes), stack, engine, is_sparing, given)
            try:
                result = one.run(source, tag, words)
            except Told as error:  # all ranks have it, and leave the block together
                told = error
            except Exception as error:
                failure = error
                raise
    except ZckptError as error:  # others have failed first, and this rank may have its own error
        if failure is None or failure is error:
            raise
        raise failure from None
    if told is not None:
        with api.telling():
            raise told.error
    return result


def words_for(engine: Any, words: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments with which `reshard` makes files for this engine.

    These are `words`, and the engine's ds_config, number of data-parallel ranks and ZeRO stage.
    Raises WrongOption if `words` ask for another number of ranks or another stage.
    """
    wanted = {"dp": engine.dp_world_size, "stage": engine.zero_optimization_stage()}
    for name, size in wanted.items():
        if words.get(name) not in (None, size):
            raise WrongOption(
                "options-conflict",
                f"{name}={words[name]!r} is given, but this engine has {name}={size}",
                hint=f"leave {name} out: zckpt uses the engine's value",
            )
    return {"config": plain(engine.config), **words, **wanted}


def plain(value: Any) -> Any:
    """Converts a ds_config to JSON values; other objects become their `str`."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)


class Files(Struct, frozen=True, eq=False):
    """The files that the engine will load, and which tensors of the source fill them.

    The files lie in a directory as shells: headers, and holes where tensors go.
    """

    pairs: list[plan.Pair]
    pieces_of: Callable[[str], list[plan.TargetPiece]]
    records: dict[str, dict[int, int]]
    """For each file's path, the storages that the source fills: {offset in the file: bytes}."""

    @classmethod
    def of(cls, source: Manifest, shells: Manifest, layout: Layout) -> Files:
        pairs = plan.join(source, shells, layout.from_masters)
        records: dict[str, dict[int, int]] = {path: {} for path in shells.files.paths}
        for record in shells.files.records:
            extent = record.extent
            records.setdefault(extent.file, {})[extent.offset] = extent.length
        return cls(pairs, plan.files(pairs)[1], records)


class Load(Struct, eq=False, dict=True):
    """One load in one rank; `given` are the arguments of the engine's own `load_checkpoint`."""

    ranks: Ranks
    stack: ExitStack
    engine: Any
    is_sparing: bool
    given: dict[str, Any]

    def run(self, path: str, tag: str | None, words: dict[str, Any]) -> tuple[str | None, Any]:
        folder = self.stack.enter_context(temporary.directory())
        where = self.stack.enter_context(api.local(path))
        error: Exception | None = None
        try:
            with uncollected():
                self._prepare(where, folder, {**words, "tag": tag})
        except (ZckptError, OSError) as problem:
            error = problem
        self._agree_on(error)
        self.stack.enter_context(unchanged(self.source.files.fingerprints))
        return self._loaded(folder)

    def _prepare(self, where: str, folder: str, words: dict[str, Any]) -> None:
        """Writes the engine's files into `folder`, with holes for tensor data; reads no tensor.

        `where` is the path of the source checkpoint, and `words` are arguments of `zckpt.reshard`.
        """
        decision, how = api.decided(where, "deepspeed", **words)
        self.check = partial(api.check_beforehand, decision, how)
        layout, self.where = decision.layout, decision.manifest.root
        self.source = layout.source or decision.source
        temporary.lay(folder, layout.shells())
        self.files = Files.of(self.source, api.shells_of(decision)(folder), layout)
        refuse_files(self.where, self.files.records)
        self.lines = [*layout.omitted, *layout.warnings]

    def _agree_on(self, error: Exception | None) -> None:
        """Raises the same error in all ranks if one rank failed, or if ranks read different files.

        `error` is the error of this rank, or None. Rank 0 also runs `self.check`, which reads
        tensors; an error there is raised in all ranks too.
        """
        mark = None if error else _mark(self.source.files.records, self.files.records)
        values = self.ranks.gathered([sent(error), mark])

        def decide() -> None:
            for number, (failure, other) in enumerate(values):
                if failure is not None:
                    raise received(failure)
                if other != mark:
                    raise WrongOption(
                        "processes-disagree",
                        f"rank {number} does not read the same checkpoint as rank 0, or has other "
                        "options",
                        hint="all processes must see the same files, and give the same arguments",
                    )
            log(LOG, [*self.lines, *self.check()])

        self.ranks.told(decide)

    def _loaded(self, folder: str) -> tuple[str | None, Any]:
        agreement = Agreement(self.ranks, self.source, self.files.pairs, self.is_sparing)
        chunk = chunk_size(self.source.dp, 1, MEMORY)
        (reader,) = self.stack.enter_context(reading([agreement.checker], chunk))
        engines_own = self.engine.checkpoint_engine
        loading = LoadingEngine(engines_own, folder, self, agreement, reader, chunk)
        self.engine.checkpoint_engine = loading
        try:
            loaded, client_state = self.engine.load_checkpoint(folder, **self.given)
            if not loading.is_concluded:
                loading.agree(None, is_last=True)
        finally:
            self.engine.checkpoint_engine = engines_own
        return (api.translated(self.where) if loaded else None), client_state

    @property
    def stage(self) -> int:
        return int(self.engine.zero_optimization_stage())

    @property
    def reads_optimizer(self) -> bool:
        """Whether the engine loads an optimizer file after the model file."""
        wants = self.given["load_optimizer_states"] and not self.given["load_module_only"]
        return bool(self.stage and wants)


class LoadingEngine:
    """Replaces DeepSpeed's checkpoint engine (`own`) during one load.

    Files below `folder` are filled from the source checkpoint when they are loaded. All other
    files, methods and attributes are those of `own`.
    """

    def __init__(
        self,
        own: Any,
        folder: str,
        load: Load,
        agreement: Agreement,
        reader: ElementReader,
        chunk: int,
    ) -> None:
        self._own, self._folder = own, os.path.join(folder, "")
        self._load, self._agreement = load, agreement
        self._chunk = chunk
        self._assembler = Assembler(reader, {}, agreement.checking, frozenset())
        self._looked: dict[str, Any] = {}
        self._is_touched = False
        self.is_concluded = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Loads the file at `path`, filled from the source checkpoint if it is below `folder`."""
        path = os.path.normpath(path)
        if not path.startswith(self._folder):
            return self._own.load(path, map_location)
        if path in self._looked:  # the state dict that it has looked at before is still unchanged
            self._is_touched = True
            return self._looked.pop(path)
        value, error = None, None
        try:
            value = self._filled(path, map_location)
        except (ZckptError, OSError) as problem:
            error = problem
        is_last = path.endswith(OPTIMIZER) or not self._load.reads_optimizer
        self.agree(error, is_last)
        if path.endswith(MODEL):  # SDLoaderBase looks into the first file, and then loads it
            self._looked[path] = value
        return value

    def agree(self, error: Exception | None, is_last: bool) -> None:
        """Waits until all ranks have read their file.

        Raises Told in all ranks if one of them failed, or if the source is damaged.
        """
        try:
            is_all = self._load.reads_optimizer or not self._load.stage
            self._agreement.agree(error, is_last, is_all)
        except Told as told:
            if self._is_touched and isinstance(told.error, ZckptError):
                raise Told(told.error.with_way(TOUCHED)) from None
            raise
        self.is_concluded = is_last

    def _filled(self, path: str, map_location: Any) -> Any:
        files = self._load.files
        about = files.records.get(path, {}), files.pieces_of(path), self._assembler, self._chunk
        with FilledFile(path, *about) as file:
            return file.load(map_location)


def _mark(records: Any, files: dict[str, dict[int, int]]) -> int:
    """Computes a checksum of source and target; if it is equal, ranks load the same files."""
    crc = mark_of(records)
    for path, storages in files.items():
        crc = crc32(f"{os.path.basename(path)} {sorted(storages.items())};".encode(), crc)
    return crc
