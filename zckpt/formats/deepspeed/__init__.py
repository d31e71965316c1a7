"""DeepSpeed's directories of stages 0, 1, 2 and 3, as engine.save_checkpoint writes them.

    <run>/latest                                              the tag, as text
    <run>/<tag>/mp_rank_00_model_states.pt                    stage 1, 2: weights, buffers, counters
                                                              stage 0: the optimizer too
    <run>/<tag>/zero_pp_rank_R_mp_rank_00_model_states.pt     stage 3: one per rank, weights empty
    <run>/<tag>/layer_M_expert_N_mp_rank_00_model_states.pt   expert N of layer M
    <run>/<tag>/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   R is the data-parallel rank

Pipelines and tensor parallelism add model ranks: mp_rank_01 and so on, each with such files. A
pipeline's layers have their weights in layer_NN[-model_TT]-model_states.pt.

    layer_names.py       the pipeline layer of a tensor, and the stages that may have a layer
    sequence_ranks.py    the number of ranks that share each sequence (Ulysses)
    files.py             finds the checkpoint's files and model ranks; refuses layouts by file names
    flats.py             the flat buffers of fp32 masters and optimizer states
    ranks.py             reads the ranks' files and compares what they state
    stage_0/             runs without ZeRO
    model_ranks/         pipelines and tensor parallelism
    moe/                 experts
    ep_optimizers.py     experts without ZeRO: the optimizers of all ep ranks
    weights.py           reads the weights if the optimizer state is unreadable
    read.py              builds the manifest, with model ranks apart or joined
    gather/              the engine's own rule for its partitions
    target_ranks.py      a target's model ranks, and the part of the source that each one gets
    optimizer_files.py   the optimizer files of a target, also elastic ones
    older_model.py       a lost model file's values, from the model file of an older save
    run_template.py      `--like`: fits a source of another engine to the ranks and groups of a run
    write.py             writes the same files for other ranks, another stage or type
    functions.py         the functions of this format, and why another run does not load its files

Each module imports only modules listed above it. formats/deepspeed_states contains what these files
share with DeepSpeed's universal checkpoints. Facts in this package are of DeepSpeed 0.19.8 unless
said otherwise; files back to 0.5.10 are read.
"""

from ..deepspeed_states import OBJECTS, options
from ..deepspeed_states.directories import ROLES
from ..format import Format
from .files import counter, detect, pointer, tags

FORMAT = Format(
    name="deepspeed",
    about="DeepSpeed 0.5.10 to 0.19.8, ZeRO stages 0 to 3 "
    "(tested with real files of 0.8.2, 0.9.3, 0.11.0, 0.13.1, 0.18.2, 0.19.8)",
    family="deepspeed",
    detect=detect,
    tags=tags,
    counter=counter,
    pointer=pointer,
    options=(*options.OPTIONS, *options.OF_RANKS),
    numbers=True,
    compares="beginnings",
    keeps_shapes=True,
    states="a flat buffer stores only tensors of the parameters' shapes, and numbers that all of "
    "its parameters share; --stage 0 stores every state, unless the optimizer is a FusedAdam",
    keeps_estimates=True,
    roles=ROLES,
    loads_by_place=True,
    objects=OBJECTS,
)
