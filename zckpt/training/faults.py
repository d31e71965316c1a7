"""Known bugs of training programs that save or load wrong values without an error.

Files do not state these bugs: only saved arguments, versions or values are signs of them. The
readers and writers of zckpt that detect such a sign use the messages here. docs/faults.md is made
from this table: `python -m tests.fault_page > docs/faults.md`.
"""

from __future__ import annotations

from msgspec import Struct


class Fault(Struct, frozen=True):
    """A bug of a program that saves or loads checkpoints, and what zckpt does about it.

    The fields are the program, what is wrong, the sign in files, the source code, and zckpt's
    action. `message` describes the bug as a part of a sentence, for reports and errors. `hint` says
    what the user can do.
    """

    name: str
    program: str
    versions: str
    wrong: str
    sign: str
    source: str
    action: str
    message: str
    hint: str = ""


INTERLEAVED = Fault(
    "megatron-fsdp2-gated",
    "Megatron-Core",
    "0.16.1, and newer according to the source code",
    "With torch's FSDP2 and a gated MLP, the rows of gate and up are interleaved per rank, in "
    "weights, masters and moments. Only a run with the same number of ranks loads them correctly.",
    "the saved arguments have `use_torch_fsdp2` and `swiglu`, and the run had several data ranks",
    "`transformer/mlp.py`, `apply_swiglu_sharded_factory`; `utils.py`, "
    "`make_tp_sharded_tensor_for_checkpoint`",
    "zckpt reads the rows of gate and up in the module's order, and converts them in this order. "
    "zckpt refuses runs with experts, and refuses to write Megatron-Core's files for a run with "
    "torch's FSDP2.",
    "Megatron-Core with torch's FSDP2 interleaves the rows of gated layers (linear_fc1) by ranks, "
    "and loads them correctly only with the same number of ranks",
    "resume with the same number of ranks from the directory itself, or convert to another format",
)
MIXED_BUCKETS = Fault(
    "megatron-mixed-buckets",
    "Megatron-Core",
    "0.14 to 0.19.2",
    "With several gradient buckets, `fully_reshardable` files contain masters and moments at wrong "
    "offsets if a bucket has padding at its end. The weights are right.",
    "masters do not round to their weights",
    "`optimizer/distrib_optimizer.py`: offsets include padding, but the gathered buffer has none",
    "zckpt refuses the optimizer's state. With `--masters-from-weights`, zckpt drops all masters "
    "that may be wrong, and their moments. With `--weights-only`, zckpt writes only the weights.",
    "Megatron-Core up to 0.19.2 writes wrong masters and moments into fully_reshardable files if "
    "there are several gradient buckets",
    "--masters-from-weights leaves out all masters that may be wrong and their moments, and "
    "--weights-only writes only the weights",
)
OLD_QKV = Fault(
    "megatron-old-qkv",
    "Megatron-LM",
    "files with a `checkpoint_version` below 2",
    "The rows of `linear_qkv` have another order than the module's.",
    "the `checkpoint_version` in `model_optim_rng.pt` is below 2, or is missing",
    "`checkpointing.py`, `fix_query_key_value_ordering`",
    "zckpt refuses the checkpoint.",
    "its linear_qkv has another order of rows",
    "load it in Megatron-LM, which reorders the rows, and save it again",
)
LOCAL_LAYERS = Fault(
    "megatron-fsdp-stages",
    "Megatron-FSDP",
    "Megatron-Core 0.16.1 and 0.19.2",
    "All pipeline stages number their layers from 0 and save the same keys, so the files contain "
    "the layers of one stage only.",
    "the arguments or keys of an `fsdp_dtensor` directory show several stages or model chunks",
    "`transformer/fsdp_dtensor_checkpoint.py`",
    "zckpt refuses the checkpoint.",
    "in Megatron-FSDP, each stage or chunk numbers its layers from 0, so all of them wrote the "
    "same keys",
    "train and save it with one pipeline stage",
)
ADAPTER_PART = Fault(
    "accelerate-peft-part",
    "Accelerate",
    "before 1.15",
    "With PEFT under FSDP2 and `FULL_STATE_DICT`, only rank 0 writes a file, which contains only "
    "its shards of the adapter. The shards of the other ranks are lost.",
    "`pytorch_model_fsdp*.bin` has DTensors of several ranks, with names of an adapter",
    "`accelerate/utils/fsdp_utils.py`, `save_fsdp_model`",
    "zckpt refuses the file, and names the complete `adapter_model.safetensors` beside it.",
    "with PEFT under FSDP2, accelerate before 1.15 loses the shards of the other ranks",
)
ZERO_SCALARS = Fault(
    "torch-consolidated-scalars",
    "torch",
    "2.13",
    "When torch consolidates Hugging Face shards, it writes 0 for 0-d weights (no dimensions).",
    "a 0-d weight has the value 0, and the safetensors file has no `__metadata__`",
    "`torch/distributed/checkpoint/_consolidate_hf_safetensors.py`",
    "zckpt warns, and names the weights.",
    "torch 2.13 writes 0 for 0-d weights (no dimensions) when it consolidates a directory",
    "compare the 0-d weights with the shards that torch has consolidated",
)
UNSCALED_GRADIENTS = Fault(
    "deepspeed-stage-0-gradients",
    "DeepSpeed",
    "0.18.3 to 0.19.8",
    "In fp16 without ZeRO, gradients are divided by the loss scale, but the loss is not multiplied "
    "by it. Moments are smaller than with ZeRO.",
    "the files state fp16 and DeepSpeed 0.18.3 or newer, and are converted to or from stage 0",
    "`runtime/fp16/fused_optimizer.py` and `runtime/engine.py`",
    "zckpt keeps the moments unchanged, and warns that the first updates differ.",
    "in fp16 without ZeRO, DeepSpeed since 0.18.3 divides gradients by the loss scale, but does "
    "not multiply the loss by it: moments are smaller than with ZeRO, so the first updates differ",
)
UNIVERSAL_STAGE_3 = Fault(
    "deepspeed-universal-stage-3",
    "DeepSpeed",
    "0.14.5 to 0.17.6",
    "At stage 3, the loader of universal directories supports only one parameter group with one "
    "sub-group. On several machines it loads wrong values without an error.",
    "the target is a universal directory for stage 3, and DeepSpeed before 0.18 saved the source",
    "`runtime/zero/stage3.py`: the loader reads only `param_shapes[0]`, and slices tensors by the "
    "local rank",
    "zckpt warns when it writes a universal directory for stage 3.",
    "before 0.18, DeepSpeed's loader of universal directories at stage 3 supports only one "
    "parameter group with one sub-group, and on several machines this loader loads wrong values "
    "without an error",
    "load with DeepSpeed 0.18 or newer, or write --to deepspeed",
)
TRANSPOSED = Fault(
    "deepspeed-zenflow",
    "DeepSpeed",
    "ZenFlow at stages 1 and 2: before 0.19.7; ZenFlow at stage 3: all versions up to 0.19.8",
    "Matrices are saved transposed, but the saved shapes are those of the untransposed matrices.",
    "the saved ds_config has `zenflow`, and the stage is 3 or the version is before 0.19.7",
    "`runtime/zenflow/zenflow_utils.py`, `_flatten_dense_tensors`; `engine_stage3.py`",
    "zckpt refuses the checkpoint.",
    "which saves matrices transposed",
)
QUANTIZED = Fault(
    "deepspeed-moq",
    "DeepSpeed",
    "0.4.0 to 0.19.6",
    "With MoQ, 16-bit weights are quantized after each update, but masters are not: the weights "
    "differ from the rounded masters.",
    "the saved ds_config has `quantize_training` or `weight_quantization`",
    "`runtime/quantize.py`",
    "zckpt warns, and keeps weights and masters unchanged. `verify` lists the weights that differ "
    "from their rounded masters.",
    "the run quantized its weights after each update (MoQ), so they differ from the rounded "
    "masters; both are kept unchanged, and `verify` lists these weights",
)
LOST_FROZEN = Fault(
    "deepspeed-frozen",
    "DeepSpeed",
    "before 0.9.1",
    "Frozen weights are not saved at stage 3.",
    "frozen parameters are listed with 0 elements",
    "`runtime/engine.py`",
    "zckpt warns, and names the weights.",
    "DeepSpeed before 0.9.1 did not save frozen weights in stage 3",
)
COUNTED_START = Fault(
    "deepspeed-counted-start",
    "DeepSpeed",
    "before 0.13.2",
    "The engine makes one update with zero gradients when it starts, and counts it.",
    "the step is 1, and every moment is 0",
    "`runtime/zero/stage_1_and_2.py`, `initialize_optimizer_states`",
    "zckpt warns, and does not use the engine's counter as the step.",
    "DeepSpeed before 0.13.2 counts its start as an update",
)
LOST_STEPS = Fault(
    "deepspeed-universal-steps",
    "DeepSpeed",
    "before 0.14.1",
    "`ds_to_universal.py` writes the step only if the optimizer stores it in the parameter group.",
    "a universal directory has moments without a step",
    "`checkpoint/ds_to_universal.py`",
    "zckpt warns.",
    "there are moments without a step: the converter did not write the step (DeepSpeed before "
    "0.14.1)",
    "use the run's original checkpoint, from which the converter made this one",
)
HASHED_GROUPS = Fault(
    "deepspeed-expert-groups",
    "DeepSpeed",
    "0.19.8",
    "If layers have different expert-parallel sizes, their groups are in the order of Python's "
    "string hashes, which differs between processes.",
    "ranks list the groups of one optimizer in different orders",
    "`moe/utils.py`, `split_params_into_different_moe_groups_for_optimizer`",
    "Without ZeRO, zckpt refuses the checkpoint. With ZeRO, zckpt sorts the groups by name.",
    "lists the optimizer groups in another order than the file of ep rank 0",
    "sort the groups in the training program, or set PYTHONHASHSEED, and save again",
)

SHARED_FILES = Fault(
    "deepspeed-mesh-stage-3",
    "DeepSpeed",
    "0.19.8",
    "With `mesh_param=(data ranks, sequence ranks)`, ZeRO stage 3 partitions over all ranks, but "
    "names files by the data-parallel rank only. The ranks that share a sequence overwrite each "
    "other's files, and shards of all parameters are lost. The engine resumes from such files with "
    "wrong weights.",
    "at stage 3, partitions are so short that the run must have had several times as many ranks as "
    "there are files",
    "`runtime/zero/partition_parameters.py` partitions over all ranks; `runtime/engine.py`, "
    "`_get_zero_ckpt_name`",
    "zckpt refuses the checkpoint.",
    "shards of all parameters are lost: with mesh_param, DeepSpeed (0.19.8) partitions stage 3 "
    "over all ranks, but the ranks that share a sequence write the same files",
    "give the engine mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp instead of "
    "mesh_param, or train at stage 2",
)

FAULTS = (
    INTERLEAVED,
    MIXED_BUCKETS,
    OLD_QKV,
    LOCAL_LAYERS,
    ADAPTER_PART,
    ZERO_SCALARS,
    UNSCALED_GRADIENTS,
    UNIVERSAL_STAGE_3,
    TRANSPOSED,
    QUANTIZED,
    LOST_FROZEN,
    COUNTED_START,
    LOST_STEPS,
    HASHED_GROUPS,
    SHARED_FILES,
)
"""All faults, in the order of docs/faults.md."""
