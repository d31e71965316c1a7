"""Megatron-FSDP's directories: --ckpt-format fsdp_dtensor, saved by torch.distributed.checkpoint.

    model.module.<name>                               weights, fp32: the optimizer updates them
    optimizer.state.module.module.<name>.exp_avg      moments; torch's Adam has a step beside them
    optimizer.param_to_group_meta.module....<name>.lr every parameter's group, value by value
    args, iteration, opt_param_scheduler.max_lr       what ranks share
    rng_state.(pp, tp).0.torch_rng_state              states of single ranks

Names are those of modules, behind one `module.` for each wrapper. A gated `linear_fc1` is two
tensors: <name>_w for the gate, <name>_v for the other half. All tensors have their global shape,
and experts have their numbers in the whole layer.

Layers have the numbers of their pipeline stage, so the stages of a pipeline write the same keys.
Only directories of one stage are read. Proven with megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

import re
from typing import Any

from msgspec.structs import replace

from ....core.inert import Scalar, inside
from ....core.manifest import Manifest, slot_name
from ....errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedCheckpoint, counted
from ....files.dcpfile import shown
from ....training import steps
from ..common import FSDP, WEIGHTS_ONLY, arguments
from ..contents import Content, manifest_of, require_groups, size_of
from ..groups import FileStep, agreed_step
from ..names import NORMS, OF_OUTPUT, KeysOfGpt
from ..weightless import without_weights
from .items import FsdpItems, joined, plain_name

OF_RANK = re.compile(r"\((\d{1,9}), (\d{1,9})\)")  # stage, tensor rank
MASTER = "master_param"  # of Transformer Engine's Adam, if it keeps the masters itself
MASTERS, MOMENTS = ("F32",), ("F32", "BF16")  # types; its others go with scales or with weights


def read_fsdp(folder: str, step_policy: str | None, weights_only: bool) -> Manifest:
    """The manifest of a directory of Megatron-FSDP.

    Raises UnsupportedCheckpoint for several pipeline stages or model chunks, for gated layers of
    several tensor ranks whose halves are not apart, and for states of another kind than moments.
    """
    return _FsdpReader(FsdpItems(folder, weights_only)).manifest(step_policy)


class _FsdpReader:
    """One directory; `tp` is its number of tensor ranks."""

    def __init__(self, items: FsdpItems) -> None:
        self.items = items
        self.folder = items.folder
        self.args = arguments({"args": items.tree("megatron.common.args", "args")})
        self.places = self._places()
        self.tp = self._require_known()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.of_groups: list[FileStep] = []  # the steps of groups

    def manifest(self, step_policy: str | None) -> Manifest:
        items = self.items
        if not items.weights:
            others = (str(path[0]) for path in items.others)
            raise without_weights(self.folder, items.states, others)
        for name, keys in joined(self.folder, items.weights).items():
            self.shapes[name] = items.enter(name, "param", keys).shape
        self._require_halves()
        firsts = dict.fromkeys(str(path[0]) for path in items.others)
        common = {
            first: items.tree(inside("megatron.common", first), first)
            for first in firsts
            if first != "rng_state" or not self.places
        }
        slots: set[str] = set()
        group_of: dict[str, int] = {}
        has_states = bool(items.metas or items.states)
        if has_states:
            slots = self._moments()
            groups, group_of = self._groups()
            common["optimizer"] = {"optimizer": {"param_groups": groups, **self._step(step_policy)}}
        known, objects = self._modules()
        if items.file is None:
            raise CorruptCheckpoint(f"{self.folder} has nothing beside its weights")
        content = Content(
            folder=self.folder,
            file=items.file,
            common=common,
            entries=items.entries,
            shapes=self.shapes,
            frozen={name for name in self.shapes if group_of and name not in group_of},
            slots=slots,
            sharding=FSDP if has_states else None,
            files=items.paths(),
            records=items.records,
            keys=known,
            objects=objects | self._random_states(),
            left_out=[f"{name}, a file of the directory" for name in items.strangers()],
            group_of=group_of,
        )
        return manifest_of(content, step_policy)

    # -- the ranks

    def _places(self) -> list[tuple[int, int]]:
        """The stages and tensor ranks that have random states."""
        ranks = dict.fromkeys(
            str(path[1]) for path in self.items.others if path[0] == "rng_state" and len(path) > 1
        )
        matches = map(OF_RANK.fullmatch, ranks)
        return [(int(match[1]), int(match[2])) for match in matches if match]

    def _require_known(self) -> int:
        """The number of tensor ranks; raises UnsupportedCheckpoint for several stages."""
        stated = size_of(self.args, "pipeline_model_parallel_size")
        if stated is None and not self.places:
            raise UnsupportedCheckpoint(
                f"{self.folder} has neither args nor rng_state, so nothing says how many pipeline "
                "stages the run had"
            )
        stages = max(stated or 1, *(1 + pp for pp, _ in self.places), 1)
        chunked = self.items.chunks - {"model"}
        if stages > 1 or chunked:
            what = "several model chunks" if chunked else counted(stages, "pipeline stage")
            raise UnsupportedCheckpoint(
                f"{self.folder} was saved with {what}: Megatron-FSDP numbers the layers of each "
                "from 0, so that they wrote the same keys",
                hint="train and save it with one pipeline stage",
            )
        seen = max((1 + tp for _, tp in self.places), default=1)
        tp = size_of(self.args, "tensor_model_parallel_size") or seen
        require_groups(self.folder, self.args, tp)
        return tp

    def _require_halves(self) -> None:
        """Raises UnsupportedCheckpoint if tensor ranks have both halves of one gated tensor.

        Then its rows are gate and up of the first rank, gate and up of the second, ...
        """
        ranks = max(self.tp, size_of(self.args, "expert_tensor_parallel_size") or 1)
        for raw in self.items.weights if ranks > 1 else ():
            name = plain_name(raw)
            shape = self.shapes.get(name, ())
            after = self.shapes.get(name.replace("linear_fc1.weight", "linear_fc2.weight"), ())
            is_gated = len(after) == 2 and shape[:1] == (2 * after[1],)
            if name.endswith("linear_fc1.weight") and is_gated:
                raise UnsupportedCheckpoint(
                    f"{self.folder}: the halves of {name} are not apart, and zckpt does not know "
                    f"the order in which {ranks} tensor ranks have them",
                    hint="save it from one tensor rank",
                )

    def _random_states(self) -> dict[str, Any]:
        """The random states of ranks, by the keys that torch_dist has for them."""
        result = {}
        for pp, tp in self.places:
            key = f"rng_state/shard_{pp}.{tp}_1.{self.tp}"
            place = inside(f"megatron.objects.{key}", 0)
            result[key] = [self.items.tree(place, "rng_state", f"({pp}, {tp})")]
        return result

    # -- the optimizer

    def _moments(self) -> set[str]:
        """Enters moments, and masters that the optimizer keeps; returns the optimizer's slots."""
        slots = set()
        for state, raw in self.items.states.items():
            if state == "step":
                continue
            slot = "master" if state == MASTER else slot_name(state)
            for name, keys in joined(self.folder, raw).items():
                shape = self.shapes.get(name)
                if shape is None:
                    raise UnsupportedCheckpoint(
                        f"{self.folder} has {shown(keys[0])}, which is the state of no weight",
                        hint=WEIGHTS_ONLY,
                    )
                entry = self.items.enter(name, slot, keys)
                if entry.dtype not in (MASTERS if slot == "master" else MOMENTS):
                    raise UnsupportedCheckpoint(
                        f"{self.folder}: {shown(keys[0])} is of type {entry.dtype}, whose scale or "
                        "rest the files do not have",
                        hint=WEIGHTS_ONLY,
                    )
                if entry.shape != shape:
                    # 0.16.1 parts exp_avg and exp_avg_sq alone: both keys have all of another state
                    raise UnsupportedCheckpoint(
                        f"{self.folder}: {shown(keys[0])} has not the shape of its weight",
                        hint=WEIGHTS_ONLY,
                    )
            if slot != "master":
                slots.add(slot)
        return slots

    def _groups(self) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """The groups of parameters with equal values, and the group of each parameter."""
        groups: list[dict[str, Any]] = []
        group_of = {}
        for raw, keys in self.items.metas.items():
            name = plain_name(raw)
            if name not in self.shapes:
                raise IncompleteCheckpoint(
                    f"{self.folder} states the group of {name}, but has no such weight"
                )
            group = {value: self.items.number(key) for value, key in keys.items()}
            if "step" in keys:
                self.of_groups.append((self.items.file_of(keys["step"]), group["step"]))
            if group not in groups:
                groups.append(group)
            group_of[name] = groups.index(group)
        return groups, group_of

    def _step(self, policy: str | None) -> dict[str, Any]:
        """The step that all states have, if they have one; raises InconsistentCheckpoint."""
        items = self.items
        numbers = {key: items.number(key) for key in items.states.get("step", {}).values()}
        stated = [(items.file_of(key), number) for key, number in numbers.items()]
        agreed = agreed_step(self.folder, stated or self.of_groups, policy)
        if not numbers:
            return {}
        step = next(iter(numbers.values()))
        if agreed is not None and steps.step_of(step) != agreed:  # the policy's
            step = replace(step, value=agreed) if isinstance(step, Scalar) else agreed
        return {"state": {"common_step": step}}

    # -- what torch_dist has

    def _modules(self) -> tuple[dict[str, int], dict[str, Any]]:
        """The keys that the weights have in torch_dist, and the states of modules by its keys.

        0.16.1 leaves these states out: an empty one stands for each.
        """
        known = {plain_name(raw): key for raw, key in self.items.modules.items()}
        known.pop(OF_OUTPUT, None)
        fused = any(norm in raw for raw in self.items.weights for norm in NORMS)
        model = KeysOfGpt([*self.shapes, *known], fused, self.args)
        objects: dict[str, Any] = {}
        for name, key in model.items().items():
            place = inside(f"megatron.objects.{key}", 0)
            objects[key] = [self.items.value(known[name], place) if name in known else None]
        return model.keys() if objects else {}, objects
