"""The global batch size of a run, and how to keep it on another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple, TypeGuard

from msgspec import Struct

from ..core.checkpoint.facts import FlatBufferEngine
from ..core.checkpoint.manifest import Manifest
from ..errors import Notice, warning
from .megatron_arguments import arguments
from .trainers import TRANSFORMERS, program_of

MOST_SAMPLES = 1 << 40  # in a batch
MOST_TO_DIVIDE = 1 << 22  # in a batch; nobody trains with more
CHANGES = "batch-size-changes"


class Names(NamedTuple):
    """The names of a program's settings `micro` and `accumulation`, as described at `Batch`."""

    micro: str
    accumulation: str = "gradient_accumulation_steps"
    also: str = ""
    """The end of a warning that gives new values: which other settings must change too, or ""."""


SETTINGS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""The keys of a ds_config for the batch size. DeepSpeed computes those that are not stated."""
OF_DEEPSPEED = Names("train_micro_batch_size_per_gpu")
OF_TRAINER = Names(
    "per_device_train_batch_size", also=" (and the numbers in your ds_config, if they are not auto)"
)
OF_ANY = Names("the batch size of each rank", "accumulated steps")


class Batch(Struct, frozen=True):
    """The global batch size, and the settings of the program that determine it.

    total          samples per update, over all ranks; None if unknown
    names          the program's names of `micro` and `accumulation`
    micro          samples of a rank in one forward pass; None if unknown
    accumulation   forward passes per update; None if unknown
    is_computed    whether DeepSpeed computes a setting that its configuration does not state
    """

    total: int | None
    names: Names
    micro: int | None = None
    accumulation: int | None = None
    is_computed: bool = False

    @property
    def subject(self) -> str | None:
        """The program's name for the batch size of each rank; None if the program is unknown.

        Warnings about the batch size state this name in their field `subject`.
        """
        return None if self.names == OF_ANY else self.names.micro

    def setting(self, ranks: int) -> str | None:
        """The numbers to set on `ranks` ranks, such as "per_device_train_batch_size=2".

        None if they fit already, or if DeepSpeed divides the batch itself. `total` must be a
        multiple of `ranks`.
        """
        assert self.total is not None
        micro, accumulation, also = self.names
        per_rank = self.total // ranks
        if self.accumulation is None or self.total > MOST_TO_DIVIDE:
            return f"the product of {micro} and {accumulation} to {per_rank}"
        if self.is_computed and per_rank % (self.micro or self.accumulation) == 0:
            return None
        fitting, rest = divmod(per_rank, self.accumulation)
        if rest:
            most = per_rank if self.micro is None else min(per_rank, self.micro)
            size = next(count for count in range(most, 0, -1) if per_rank % count == 0)
            return f"{micro}={size} and {accumulation}={per_rank // size}{also}"
        return f"{micro}={fitting}{also}" if fitting != self.micro else None


def global_batch(manifest: Manifest) -> int | None:
    """The number of samples per update; None if it is not stated, or if counters contradict it.

    It is read from Megatron's saved arguments, or else from the engine's configuration.
    """
    state, engine, origin = manifest.state, manifest.run.engine, manifest.run.origin
    of_megatron = (state.get("megatron") or {}).get("common")
    for saved in (state.get("client_state"), of_megatron):
        if is_count(total := arguments(saved).get("global_batch_size")):
            return total
    if not isinstance(engine, FlatBufferEngine):
        return None
    total, micro, accumulation = (engine.config.get(name) for name in SETTINGS)
    accumulation = 1 if accumulation is None else accumulation
    if is_count(total):
        return total
    if not is_count(micro) or not is_count(accumulation) or origin.dp is None:
        return None
    product = micro * accumulation * origin.sequences
    counters: Mapping[str, Any] = state.get("counters") or {}
    steps, samples = counters.get("global_steps", 0), counters.get("global_samples", 0)
    # a copy for other ranks has the source's configuration, and a run may change its batch size
    is_counted = is_count(steps) and type(samples) in (int, float) and samples > 0
    return None if is_counted and samples != steps * product else product


def is_of_trainer(source: Manifest) -> bool:
    """Whether the Trainer of transformers saved the checkpoint; it sets the batch size itself."""
    return program_of(source.files.siblings) == TRANSFORMERS


def of_next_run(
    source: Manifest, ranks: int, config: Mapping[str, Any] | None = None, sp: int = 1
) -> list[Notice]:
    """A warning that says what to set to keep the global batch on `ranks` ranks.

    `config` is the next run's ds_config, or else the source's; None for a program without one. The
    list is empty if nothing must be set, or if neither the batch nor the source's ranks are known.
    """
    batch = in_state_dicts(source) if config is None else in_config(source, config)
    is_known = batch.total is not None or source.run.origin.dp is not None
    return changes(batch, source, ranks, sp) if is_known else []


def in_state_dicts(source: Manifest) -> Batch:
    """The source's global batch, for a target program that saves no batch size (FSDP, for example).

    The program's settings `micro` and `accumulation` are unknown, and so None in the result.
    """
    names = Names(OF_TRAINER.micro) if is_of_trainer(source) else OF_ANY
    return Batch(global_batch(source), names)


def in_config(source: Manifest, config: Mapping[str, Any]) -> Batch:
    """The batch settings of a ds_config; if it states no global batch, `total` is the source's.

    A ds_config may state only the batch size of each rank. `total` is not computed from that size,
    because the ds_config may belong to the next run, which may have another number of ranks.
    """
    names = OF_TRAINER if is_of_trainer(source) else OF_DEEPSPEED
    total, micro, accumulation = (config.get(name) for name in SETTINGS)
    stated = [size for size in (micro, accumulation) if size is not None]
    is_computed = names == OF_DEEPSPEED and is_count(total) and len(stated) < 2
    is_computed = is_computed and all(map(is_count, stated))
    total = total if is_count(total) else global_batch(source)
    accumulation = 1 if accumulation is None else accumulation
    micro = micro if is_count(micro) else None
    if total is None or not is_count(accumulation) or not (micro or is_computed):
        return Batch(total, names, micro)
    # a copy for other ranks has the configuration of the first ones
    product = (micro or 0) * accumulation * source.run.origin.sequences
    engine = source.run.engine
    is_sources = isinstance(engine, FlatBufferEngine) and config == engine.config
    if is_sources and not is_computed and product != total:
        return Batch(total, names)
    return Batch(total, names, micro, accumulation, is_computed)


def changes(batch: Batch, source: Manifest, ranks: int, sp: int = 1) -> list[Notice]:
    """A warning that says what to set to keep the global batch on `ranks` data-parallel ranks.

    `sp` of these ranks share each sequence. If the global batch is unknown, the warning states the
    factor for the batch size per rank. The list is empty if nothing must be set.
    """
    before, now = source.run.origin.sequences, max(1, ranks // sp)
    micro, accumulation, _ = batch.names
    kept = "the global batch" if batch.total is None else f"a global batch of {batch.total}"
    if before == now and (batch.total is None or batch.accumulation is None):
        return []
    if batch.total is None:
        share = Fraction(before, now)
        times = f"{share} {'times' if share.denominator == 1 else 'of'}"
        setting: str | None = f"the product of {micro} and {accumulation} to {times} its old value"
    elif batch.total % now:
        shared = f", of which {sp} share a sequence" if sp > 1 else ""
        message = (
            f"{kept} cannot be divided among {ranks} ranks{shared}: choose another with {micro} "
            f"and {accumulation}"
        )
        return [warning(CHANGES, message, subject=batch.subject)]
    else:
        setting = batch.setting(now)
    if setting is None:
        return []
    return [warning(CHANGES, f"set {setting} to keep {kept}", subject=batch.subject)]


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value can be a number of samples: a positive integer."""
    return type(value) is int and 0 < value < MOST_SAMPLES
