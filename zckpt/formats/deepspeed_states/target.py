"""Decides everything about a DeepSpeed target before its first byte is written.

To load a checkpoint, the unmodified engine requires (0.19.8): a model file whose `module` has
exactly the module's tensors, a `dp_world_size` equal to the run's, a `base_optimizer_state` with as
many groups (stage 3: sub-groups) as the run has, and flat tensors of the length that the engine's
own partitioning gives. So zckpt partitions as the engine does, with the options of the ds_config
that the engine will run with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from shlex import quote
from typing import Any

from msgspec import Struct

from ...core.checkpoint import agreement
from ...core.checkpoint.dtypes import SIZES
from ...core.checkpoint.facts import StepPlace
from ...core.checkpoint.inert import Scalar
from ...core.checkpoint.manifest import Manifest, Sibling, slot_key
from ...core.checkpoint.states import states_of, untouched
from ...core.checkpoint.weights import WIDE, is_optimizers, weight_of
from ...core.grouping import by_key
from ...errors import (
    InconsistentCheckpoint,
    MissingData,
    Notice,
    UnsupportedCheckpoint,
    listed,
    note,
)
from ...files.torchshell import Contents, Storages, thawed
from ...training import lightning, steps
from ...training.optimizers import is_of_axis, known_optimizer
from ...training.options import GROUPS_FROM, Options
from ...training.trainers import ACCELERATE, for_ranks, program_of
from ...training.trainers_steps import counted_updates
from .. import zero
from . import schedulers
from .directories import OF_MODELS, POINTERS
from .engine import TargetEngine
from .estimates import need_same_ranks
from .experts import ExpertLayers, ExpertRanks
from .hyper import FLAT, adam_class, complete_groups, one_type, optimizer_name, wrapper
from .of_files import ENGINE_KEYS
from .states import COUNTERS

VERSION = "0.19.8"  # the version of the written layout
# files of one rank beside a trainer's checkpoint: Hugging Face Trainer, Accelerate


class TargetBuffer(Struct, frozen=True):
    """One flat buffer of the target; `names` are its parameters in the order of the buffer.

    group      the number of the param group
    numels     elements of each parameter
    paddings   elements of padding after each parameter
    """

    group: int
    names: Sequence[str]
    numels: Sequence[int]
    paddings: Sequence[int]
    starts: Sequence[int]  # first elements, then the length (stages 1 and 2)
    step: agreement.Step | None
    scalars: Mapping[str, Scalar]
    slots: Mapping[str, str]  # optimizer states and their dtypes
    master: str  # the masters' dtype
    ep: int = 1  # number of such buffers, each with the experts of some ranks


def _refuse_grid(source: Manifest) -> None:
    """Raises UnsupportedCheckpoint for the joined model of a run with a pipeline or tensor ranks.

    The manifest of a single model rank of such a run is accepted (it has a `place`).
    """
    pp, tp = source.run.origin.pp, source.run.origin.tp
    if (pp or tp) and source.place is None:
        raise UnsupportedCheckpoint(
            "target-unsupported",
            f"{source.root} was trained as a pipeline or with tensor parallelism (pp {pp}, tp "
            f"{tp}), and zckpt cannot write this format for it yet",
            hint="write --to deepspeed, with any number of pipeline stages and tensor ranks; or "
            "write the full model: --to universal, deepspeed-universal, dcp or gathered",
            file=source.root,
        )


def _refuse_untouched(source: Manifest) -> None:
    """Raises MissingData for trained parameters that the optimizer never updated.

    ZeRO needs states of every trained parameter, even if it is never used: the engine keeps zeros
    for such a parameter, while the source has no state.
    """
    if names := untouched(source):
        raise MissingData(
            "state-missing",
            f"the optimizer lists {listed(names, 4)}, but never updated "
            f"{'it' if len(names) == 1 else 'them'}: ZeRO needs states of all trained parameters",
            hint="if the program does not train them (requires_grad=False): "
            f"{' '.join(f'--frozen {quote(name)}' for name in names[:4])}"
            f"{' and so on (a GLOB names several)' if len(names) > 4 else ''}; if it trains them "
            "from now on: --groups-from RUN; --stage 0 and --to dcp keep them as they are",
        )


class DeepSpeedTarget:
    """Decides the engine, the groups and the flat buffers of a target; lists what it cannot store.

    Raises WrongOption, MissingData and InconsistentCheckpoint.
    """

    def __init__(self, source: Manifest, options: Options) -> None:
        _refuse_grid(source)
        self.source = source
        self.options = options
        self.omitted: list[Notice] = list(source.notices.omitted)
        self.engine = TargetEngine(source, options)
        self.dp = self.engine.dp
        if not options.weights_only:
            need_same_ranks(source, self.dp, self.engine.stage)
        self.wrapper = wrapper(self.engine, source) if self.engine.whole else None
        self.optimizer_state: dict[str, Any] = source.state.get("optimizer") or {}
        self.experts = ExpertLayers.of_manifest(source)
        self.expert_ranks = ExpertRanks.of_config(self.dp, self.engine.config)
        self._slots = list(filter(is_optimizers, source.slots))
        parameters = source.parameters.items()
        self.trainable = {name: parameter for name, parameter in parameters if parameter.trainable}
        self.frozen = {name: parameter for name, parameter in parameters if not parameter.trainable}
        self.aliases = source.owners
        # with --groups-from, groups of only new parameters have no states
        if not (self.engine.whole or options.weights_only or options[GROUPS_FROM]):
            _refuse_untouched(source)
        self.groups, self.assumed = complete_groups(self.engine, source)
        self.buffers = list(self._buffers())
        self.client_state = self._client_state()
        self.model_contents: dict[int, Contents] = {}
        """Maps 0 to the contents of data rank 0's model file, 1 to those of all other ranks' files.

        Without tied weights, all files have the contents under 0.
        """

    @property
    def mp_rank(self) -> str:
        """The model rank as file names spell it, such as `mp_rank_00`."""
        return self.mp_rank_of(0)

    def mp_rank_of(self, rank: int) -> str:
        """The model rank in the names of a data rank's files, such as `mp_rank_00`.

        In file names up to 0.19.5, it is the rank's index among the ranks that share its sequence.
        """
        if self.engine.has_older_names:
            return f"mp_rank_{rank % self.engine.sp:02d}"
        place = self.source.place
        return f"mp_rank_{0 if place is None else place.number:02d}"

    # -- flat buffers

    def _buffers(self) -> Iterator[TargetBuffer]:
        if not self.trainable:
            raise MissingData("optimizer-missing", "the source has no trainable parameter")
        members = by_key((item.group or 0, name) for name, item in self.trainable.items())
        for group in range(len(self.groups)):
            names = members.get(group, [])
            ep = self.experts.ep_of(names)
            first = self.experts.on_first(names) if ep > 1 else names
            numels = [prod(self.trainable[name].shape) for name in first]
            for places in self._divided(first, numels, self.dp // ep):
                laid_out = [first[place] for place in places]
                other_members = [] if ep == 1 else names
                if (
                    ep > 1 and self._has_buffer_per_parameter
                ):  # the same parameter on the other ep ranks
                    other_members = [
                        self.experts.global_name(laid_out[0], rank) for rank in range(ep)
                    ]
                yield self._buffer(group, laid_out, [numels[p] for p in places], other_members, ep)

    def _divided(self, names: Sequence[str], numels: Sequence[int], dp: int) -> list[list[int]]:
        """Divides a group's parameters among flat buffers: [[0, 2], [1]] is two buffers.

        The numbers are indices in `names`, and `numels` are the sizes of these parameters in
        elements. `dp` ranks share the buffers.
        """
        if self._has_buffer_per_parameter:
            return [[place] for place in range(len(names))]
        if self.engine.partitioned:
            widths = [-(-numel // dp) for numel in numels]
            return zero.sub_groups(widths, self.engine.sub_group_size)
        if self.engine.round_robin:
            return [zero.round_robin(len(names), dp)]
        return [list(range(len(names)))]

    @property
    def _has_buffer_per_parameter(self) -> bool:
        return self.engine.whole and self.wrapper != FLAT

    def _buffer(
        self,
        group: int,
        names: Sequence[str],
        numels: Sequence[int],
        members_on_all_ranks: Sequence[str],
        ep: int,
    ) -> TargetBuffer:
        """Makes one flat buffer of the parameters `names`; `numels` are their element counts.

        If `ep` ranks hold different experts, `members_on_all_ranks` names the parameters of all
        `ep` ranks; else it is empty. Raises MissingData if only some parameters have a state.
        """
        paddings = [0] * len(names)
        if self.engine.aligned:
            paddings = zero.alignment_paddings(numels, SIZES[self.engine.dtype])
        members = members_on_all_ranks or names
        parameters = [self.trainable[name] for name in members]
        types = by_key(pair for name in members for pair in self._states(name))
        slots = {slot: one_type(slot_key(slot), own) for slot, own in types.items()}
        for name in members:
            if missing := set(slots) - {slot for slot, _ in self._states(name)}:
                key = slot_key(min(missing))
                raise MissingData(
                    "state-missing",
                    f"the source holds {key} of other parameters of the same group, but not of "
                    f"{name}",
                    hint=f"--to gathered and --to dcp keep it as it is; to go on without it: "
                    f"--drop-state {quote(key)} (or --weights-only)",
                    subject=name,
                )
        masters = {self.master_dtype(name) for name in members}
        return TargetBuffer(
            group,
            names,
            numels,
            paddings,
            zero.offsets(numels, paddings),
            self._shared_value("step", members, [parameter.step for parameter in parameters]),
            self._shared_scalars(members),
            slots,
            masters.pop() if len(masters) == 1 else "F32",
            ep,
        )

    def _states(self, name: str) -> tuple[tuple[str, str], ...]:
        """The optimizer states of a parameter that the target stores: (("exp_avg", "F32"), ...).

        A state that does not fit into flat buffers is left out without an error;
        `writing/state_loss.py` refuses this later.
        """
        if self.options.weights_only:
            return ()
        entries = self.source.entries
        weight = weight_of(entries, name)
        # the weight of a tied layer may be in the file of another pipeline stage
        is_wide = weight.param is not None and weight.param.dtype in WIDE
        # without a master or a wide weight, 16-bit states become fp32
        widened = weight.master is None and not is_wide
        return tuple(
            (slot, "F32" if widened and dtype in ("BF16", "F16") else dtype)
            for slot in self._slots
            if (name, slot) in entries
            and (self._has_buffer_per_parameter or slot_key(slot) not in self._keys_of_other_shapes)
            for dtype in [entries[name, slot].dtype]
        )

    @cached_property
    def _keys_of_other_shapes(self) -> frozenset[str]:
        """Keys of states whose shape is not the parameter's, for at least one parameter.

        A key is included even if its state has the parameter's shape in some cases, such as the
        preconditioner of a square matrix.
        """
        parameters, all_states = self.source.parameters, states_of(self.source).values()
        return frozenset(
            state.key
            for state in all_states
            if state.form in ("other", "unsupported", "wrapper")
            or is_of_axis(state.key, [parameters[name].shape for name in state.parameters])
        )

    def master_dtype(self, name: str) -> str:
        """The type of a parameter's master; raises MissingData if the parameter has no weights."""
        weight = weight_of(self.source.entries, name)
        return weight.trained.dtype if weight.master else "F32"

    def _shared_value(self, what: str, names: Sequence[str], values: Sequence[Any]) -> Any:
        """The one value that all parameters of a flat buffer have, such as their step.

        `values` has each parameter's value. DeepSpeed stores only one per buffer, so
        InconsistentCheckpoint is raised if they differ; `what` names the value in the error.
        """
        if self.options.weights_only:
            return None
        other = next((place for place, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise InconsistentCheckpoint(
                "one-value-needed",
                f"DeepSpeed stores only one {what} for {names[0]} ({values[0]}) and {names[other]} "
                f"({values[other]}), which are in one group",
                hint="parameters with different steps must be in different groups",
                file=names[0],
                subject=names[0],
            )
        return values[0] if values else None

    def _shared_scalars(self, names: Sequence[str]) -> dict[str, Scalar]:
        """The states that are a single number, and equal for all parameters of a flat buffer.

        Numbers that differ are left out, but if the optimizer needs such a number,
        InconsistentCheckpoint is raised.
        """
        if self.options.weights_only:
            return {}
        shared: dict[str, Scalar] = {}
        needed = known_optimizer(optimizer_name(self.engine, self.source)).numbers
        scalars = [self.source.states.scalars.get(name, {}) for name in names]
        for key in dict.fromkeys(key for own in scalars for key in own):
            values = [own.get(key) for own in scalars]
            if key in needed:
                shared[key] = self._shared_value(key, names, values)
            elif values[0] is not None and all(repr(value) == repr(values[0]) for value in values):
                shared[key] = values[0]
        return shared

    def keeps_whole_momenta(self, buffer: TargetBuffer) -> bool:
        """Whether a rank has the complete Muon momentum of each parameter in its partition."""
        return (
            self.groups[buffer.group].get("use_muon") is True
            and self.engine.cuts_groups
            and not self.engine.offloads
        )

    # -- what is left out

    @property
    def trained_names(self) -> list[list[str]]:
        """The trained parameters of each group, in the order of its flat buffers."""
        names_by_group = by_key(
            (buffer.group, name) for buffer in self.buffers for name in buffer.names
        )
        return [names_by_group.get(group, []) for group in range(len(self.groups))]

    @property
    def module_names(self) -> Sequence[str]:
        """The names of all weights and buffers, in the source module's order if it is known."""
        source = self.source
        names: Sequence[str] = source.state.get("module") or ()
        return names or [*source.parameters, *source.buffers, *self.aliases]

    def listed_names(self) -> list[list[str | None]]:
        """For each group, the parameters in torch's optimizer; None stands for a frozen parameter.

        A program may give its optimizer frozen parameters too. The source's list is used if it has
        the same trained parameters as the target. Otherwise the optimizer is assumed to list only
        trained ones.
        """
        trained = self.trained_names
        module = self.source.state.get("module") or []
        members = self.optimizer_state.get("members") if self.wrapper is None else None
        names = [[None if n is None else module[n] for n in own] for own in members or ()]
        kept = [[name for name in own if name is not None] for own in names]
        if len(kept) != len(trained) or (kept != trained and not self.experts):
            return [[*own] for own in trained]
        return [  # other ep ranks have other groups of experts, and the same dense groups
            listed if kept_names == trained_names else [*trained_names]
            for listed, kept_names, trained_names in zip(names, kept, trained, strict=True)
        ]

    @property
    def lists_frozen(self) -> bool:
        """Whether the source's optimizer lists frozen parameters too."""
        return any(None in own for own in self.listed_names())

    @property
    def other_values(self) -> dict[str, dict[str, Any]]:
        """States that are neither a number nor of their parameter's shape, by parameter.

        Empty if the target's buffers are flat, because flat buffers cannot store such states.
        """
        if self.options.weights_only or not self._has_buffer_per_parameter:
            return {}
        return self.source.states.other_values

    def of_partitions(self, buffer: TargetBuffer, rank: int) -> dict[str, Any]:
        """A rank's optimizer states that cannot be divided by parameter, such as SOAP's matrices.

        They belong to the rank's partition of the `buffer`. Empty unless the source has the same
        partitions of the same buffer.
        """
        engine, parts = self.engine, self.dp if self.engine.partitioned else 1
        if self.options.weights_only or engine.whole or buffer.ep > 1:
            return {}
        lengths = [-(-numel // parts) for numel in buffer.numels]
        starts = tuple(zero.offsets(lengths, buffer.paddings)[:-1])
        return {
            row.key: row.value[rank]
            for row in self.source.states.of_form("partition")
            if row.parameters == (*buffer.names,)
            and row.part is not None
            and (row.part.stage == 3) == engine.partitioned
            and (row.part.dp, row.part.starts) == (self.dp, starts)
        }

    def _client_state(self) -> dict[Any, Any]:
        client_state = self.source.state.get("client_state") or {}
        for key in client_state:
            if key in ENGINE_KEYS:
                message = f"client_state {key!r}: DeepSpeed itself uses this key in its files"
                self.omitted.append(note("state-omitted", message, subject=str(key)))
        return {key: value for key, value in client_state.items() if key not in ENGINE_KEYS}

    def take_siblings(self) -> list[tuple[str, Sibling]]:
        """Chooses the trainer's files to copy, each with its name in the target's run directory.

        Files of single ranks are left out, because they have no meaning at another data-parallel
        size. So are files that the target writes itself, which a universal checkpoint may contain.
        """
        siblings, lines = for_ranks(self.source.files.siblings, self.source.dp, self.dp)
        self.omitted += lines
        taken, tag_folder = [], f"{self.tag}/"
        for sibling in siblings:
            if sibling.name in POINTERS or sibling.name.startswith(tag_folder):
                message = f"{sibling.name}: the target has its own file of this name"
                self.omitted.append(note("file-omitted", message, file=sibling.path))
            else:
                taken.append((sibling.name, sibling))
        return taken

    # -- what files state

    @property
    def states(self) -> set[str]:
        """The names of the optimizer states that the target's buffers have."""
        return {slot for buffer in self.buffers for slot in buffer.slots}

    @property
    def tag(self) -> str:
        tag = self.source.run.origin.tag
        of_accelerate = program_of(self.source.files.siblings) == ACCELERATE
        if of_accelerate and (tag is None or OF_MODELS.fullmatch(tag)):
            tag = "pytorch_model"  # Accelerator.load_state asks for this tag
        if lightning.is_in(self.source):
            tag = lightning.TAG
        return str(tag or f"global_step{self.counters['global_steps']}")

    @property
    def version(self) -> str:
        """The source's version of DeepSpeed.

        If another engine wrote the source: the version of DeepSpeed whose files zckpt writes.
        """
        before = self.engine.before
        return (before.version if before is not None else None) or VERSION

    @property
    def counters(self) -> dict[str, Any]:
        """The engine's counters, such as {"global_steps": 7, "skipped_steps": 0}.

        If the source lacks `global_steps`, it is the number of updates that the source has made.
        Other counters that the source lacks are 0.
        """
        counters = (self.source.state.get("counters") or {}).items()
        kept = {key: value for key, value in counters if value is not None}
        fresh = dict.fromkeys(COUNTERS, 0) | {"global_steps": counted_updates(self.source)}
        return {key: kept.get(key, fresh[key]) for key in COUNTERS}

    @property
    def step_place(self) -> StepPlace:
        """Where the target's optimizer reads its step.

        If the target is written for a class of Adam (`adam_class`), it is where that class reads
        the step. Otherwise it is where the source's optimizer does.
        """
        name = adam_class(self.engine, self.source)
        return steps.WRITTEN[name] if name else steps.kept_place(self.source)

    @cached_property
    def scheduler(self) -> schedulers.Decided:
        """The scheduler state that the target's files get, and notices; see `schedulers.decide`."""
        return schedulers.decide(self.source, schedulers.named_in(self.engine.config))

    def counts(self, buffer: TargetBuffer) -> bool:
        """Whether the step is stored in the state of this buffer.

        False only without ZeRO: some optimizers (DeepSpeed's FusedAdam) store the step only with
        the last parameter of each group.
        """
        alone = self._has_buffer_per_parameter and steps.counts_by_last(self.step_place)
        before = steps.kept_place(self.source)
        # as in a source with such an optimizer: its step may be with all parameters
        if self.source.run.origin.zero_stage == 0 and steps.counts_by_last(before):
            alone = alone and before.last_only
        return not alone or self._last_stepped[buffer.group] is buffer

    @cached_property
    def _last_stepped(self) -> dict[int, TargetBuffer]:
        return {buffer.group: buffer for buffer in self.buffers if buffer.step is not None}

    def thawed(self, value: Any, storages: Storages) -> Any:
        """Converts a value of the manifest's `state` to a value for a file of the target.

        The manifest has only the names of tensors in such a value. They are replaced by tensors,
        whose bytes are copied later. `storages` collects the storages of the tensors in the new
        file.
        """
        return thawed(value, self.source.entries, storages)
