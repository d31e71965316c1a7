"""Known faults of training programs that write or load wrongly without an error.

Only arguments, versions or values show these faults. Each fault has the sign by which a reader or a
writer of zckpt finds it; the code that can see the sign uses the fault here. docs/faults.md is made
from this table: `python -m tests.fault_page > docs/faults.md`.
"""

from __future__ import annotations

from msgspec import Struct


class Fault(Struct, frozen=True):
    """One fault: the program, what is wrong, its sign, its place in the source, zckpt's action.

    `message` is the clause for reports and errors, and `hint` the next step for the user.
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
    "0.16.1, and newer by its source",
    "With torch's FSDP2 and a gated MLP, the rows of gate and up are interleaved per rank, in "
    "weights, masters and moments. Only a run of as many ranks loads them into the right rows.",
    "`use_torch_fsdp2` and `swiglu` among the saved arguments, with more than one data rank",
    "`transformer/mlp.py`, `apply_swiglu_sharded_factory`; `utils.py`, "
    "`make_tp_sharded_tensor_for_checkpoint`",
    "It puts the rows into the module's order for every other format. It refuses to write "
    "Megatron-Core's files for another size, and experts.",
    "Megatron-Core with torch's FSDP2 interleaves the rows of gated layers (linear_fc1) by ranks, "
    "and loads them rightly only with as many ranks as saved them",
    "resume with the same number of ranks, which loads the directory as it is; or convert to "
    "another format",
)
MIXED_BUCKETS = Fault(
    "megatron-mixed-buckets",
    "Megatron-Core",
    "0.14 to 0.19.2",
    "`fully_reshardable` files of several gradient buckets have masters and moments of other "
    "places, if a bucket has padding at its end. The weights are right.",
    "masters do not round to their weights",
    "`optimizer/distrib_optimizer.py`: the gathered buffer lacks the padding that offsets count",
    "It refuses the optimizer's state. `--masters-from-weights` gives up what is wrong, and "
    "`--weights-only` takes the weights.",
    "Megatron-Core up to 0.19.2 writes fully_reshardable files of several buckets wrongly, and the "
    "moments with them",
    "--masters-from-weights gives these up, and --weights-only takes the weights alone",
)
OLD_QKV = Fault(
    "megatron-old-qkv",
    "Megatron-LM",
    "files with a `checkpoint_version` below 2",
    "The rows of `linear_qkv` have another order than the module's.",
    "`checkpoint_version` in `model_optim_rng.pt`",
    "`checkpointing.py`, `fix_query_key_value_ordering`",
    "It refuses them.",
    "its linear_qkv has another order of rows",
    "load it in Megatron-LM, which reorders the rows, and save it again",
)
LOCAL_LAYERS = Fault(
    "megatron-fsdp-stages",
    "Megatron-FSDP",
    "Megatron-Core 0.16.1 and 0.19.2",
    "Pipeline stages number their layers from 0, so that several stages save one key: the files "
    "have the layers of one stage.",
    "several stages or model chunks among the arguments or keys of an `fsdp_dtensor` directory",
    "`transformer/fsdp_dtensor_checkpoint.py`",
    "It refuses them.",
    "Megatron-FSDP numbers the layers of each from 0, so that they wrote the same keys",
    "train and save it with one pipeline stage",
)
ADAPTER_PART = Fault(
    "accelerate-peft-part",
    "Accelerate",
    "before 1.15",
    "With PEFT under FSDP2 and `FULL_STATE_DICT`, only rank 0 writes a file, which has its part of "
    "the adapter. The other parts are lost.",
    "DTensors of several ranks in `pytorch_model_fsdp*.bin` whose names are an adapter's",
    "`accelerate/utils/fsdp_utils.py`, `save_fsdp_model`",
    "It refuses the file, and names the whole `adapter_model.safetensors` beside it.",
    "accelerate before 1.15 lost their parts, with PEFT under FSDP2",
)
ZERO_SCALARS = Fault(
    "torch-consolidated-scalars",
    "torch",
    "2.13",
    "The consolidation of Hugging Face's storage writes 0 for weights without dimensions (0-d).",
    "a 0-d weight is 0 in safetensors without metadata",
    "`torch/distributed/checkpoint/_consolidate_hf_safetensors.py`",
    "It warns, and names the weights.",
    "torch 2.13 writes 0 for such weights when it consolidates a directory",
    "compare them with the run's own directory",
)
UNSCALED_GRADIENTS = Fault(
    "deepspeed-stage-0-gradients",
    "DeepSpeed",
    "0.18.3 to 0.19.8",
    "In fp16 without ZeRO, gradients are divided by the loss scale, but the loss is not multiplied "
    "by it. Moments are smaller than with ZeRO.",
    "fp16 and a move to or from stage 0, by the version in the files",
    "`runtime/fp16/fused_optimizer.py` and `runtime/engine.py`",
    "It keeps the moments as they are, and warns that the first updates differ.",
    "in fp16 without ZeRO, DeepSpeed since 0.18.3 divides gradients by the loss scale, but does "
    "not multiply the loss by it: moments are smaller than with ZeRO, so the first updates differ",
)
UNIVERSAL_STAGE_3 = Fault(
    "deepspeed-universal-stage-3",
    "DeepSpeed",
    "0.14.5 to 0.17.6",
    "The loader of universal directories takes one group in one sub-group at stage 3, and on "
    "several machines it loads wrong values without an error.",
    "stage 3 and the version of a target's source",
    "`runtime/zero/stage3.py`: `param_shapes[0]`, and cuts by the local rank",
    "It warns when it writes such a directory.",
    "before 0.18 its universal loader of stage 3 takes only one group in one sub-group, and on "
    "several machines it loads wrong values without an error",
    "load with 0.18 or newer, or write --to deepspeed",
)
TRANSPOSED = Fault(
    "deepspeed-zenflow",
    "DeepSpeed",
    "ZenFlow before 0.19.7, and at stage 3 up to 0.19.8",
    "Matrices are transposed, under shapes that do not show it.",
    "`zenflow` in the saved ds_config, its stage, and the version",
    "`runtime/zenflow/zenflow_utils.py`, `_flatten_dense_tensors`; `engine_stage3.py`",
    "It refuses them.",
    "whose files have matrices transposed",
)
QUANTIZED = Fault(
    "deepspeed-moq",
    "DeepSpeed",
    "0.4.0 to 0.19.6",
    "With MoQ, 16-bit weights are quantized after each update, and masters are not: weights are "
    "not the rounded masters.",
    "`quantize_training` or `weight_quantization` in the saved ds_config",
    "`runtime/quantize.py`",
    "It keeps both, and warns; `verify` lists the weights.",
    "the run quantized its weights after each update (MoQ): they are not the rounded masters, and "
    "both are kept as they are; `verify` lists these weights",
)
LOST_FROZEN = Fault(
    "deepspeed-frozen",
    "DeepSpeed",
    "before 0.9.1",
    "Frozen weights are not saved at stage 3.",
    "frozen names without elements",
    "`runtime/engine.py`",
    "It warns, and names the weights.",
    "DeepSpeed before 0.9.1 did not save frozen weights in stage 3",
)
COUNTED_START = Fault(
    "deepspeed-counted-start",
    "DeepSpeed",
    "before 0.13.2",
    "The engine makes one update with zero gradients when it starts, and counts it.",
    "step 1, and every moment is zero",
    "`runtime/zero/stage_1_and_2.py`, `initialize_optimizer_states`",
    "It warns, and trusts no counter of the engine for the step.",
    "DeepSpeed before 0.13.2 counts its own start as one",
)
LOST_STEPS = Fault(
    "deepspeed-universal-steps",
    "DeepSpeed",
    "before 0.14.1",
    "`ds_to_universal.py` writes the step only of optimizers that keep it in the group.",
    "moments without a step in a universal directory",
    "`checkpoint/ds_to_universal.py`",
    "It warns.",
    "there are moments without a step: the converter did not write it (DeepSpeed before 0.14.1)",
    "take it from the run's own directory",
)
HASHED_GROUPS = Fault(
    "deepspeed-expert-groups",
    "DeepSpeed",
    "0.19.8",
    "If layers have different expert-parallel sizes, their groups stand in the order of Python's "
    "hashes of texts, which each process has of its own.",
    "ranks list the groups of one optimizer in different orders",
    "`moe/utils.py`, `split_params_into_different_moe_groups_for_optimizer`",
    "It refuses such files without ZeRO, and sorts the groups by name with ZeRO.",
    "lists its groups in another order than ep rank 0's",
    "sort the groups in the training program, or set PYTHONHASHSEED, and save again",
)

SHARED_FILES = Fault(
    "deepspeed-mesh-stage-3",
    "DeepSpeed",
    "0.19.8",
    "With `mesh_param=(data ranks, sequence ranks)`, ZeRO stage 3 cuts over all ranks, but names "
    "files by the data rank alone: the ranks of a sequence write over each other, and parts of all "
    "parameters are lost. The engine resumes from such files with wrong weights.",
    "at stage 3, a rank has as many elements as if there were several times as many ranks",
    "`runtime/zero/partition_parameters.py` cuts over the world; `runtime/engine.py`, "
    "`_get_zero_ckpt_name`",
    "It refuses them.",
    "parts of all parameters are lost: with mesh_param, DeepSpeed (0.19.8) cuts stage 3 over all "
    "ranks, and those of one sequence write the same files",
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
"""Every fault, in the order of the page."""
