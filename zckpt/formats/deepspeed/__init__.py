"""DeepSpeed's directories of stage 0, 1, 2 and 3, as engine.save_checkpoint writes them.

    <run>/latest                                              the tag, as text
    <run>/<tag>/mp_rank_00_model_states.pt                    stage 1, 2: weights, buffers, counters
                                                              stage 0: the optimizer too
    <run>/<tag>/zero_pp_rank_R_mp_rank_00_model_states.pt     stage 3: one per rank, weights empty
    <run>/<tag>/layer_M_expert_N_mp_rank_00_model_states.pt   expert N of layer M
    <run>/<tag>/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   R is the data-parallel rank

With pipelines or tensor parallelism there are further model ranks, mp_rank_01 and so on, each with
such files, and layer_NN[-model_TT]-model_states.pt with the weights of a pipeline's layers.

    files.py              which files make the checkpoint, and which are refused by their names
    grid.py               which model ranks there are, and their places in the grid
    ranks.py              what the ranks' files say, and whether they say the same
    group_order.py        the groups of all ranks in one order
    flats.py              the flat buffers of fp32 masters and optimizer states
    whole.py              stage 0: the optimizer in the model file, and which names its numbers have
    naming.py             how they get these names; samples.py reads the bytes that show them
    whole_states.py       what the optimizer of stage 0 keeps
    experts.py            the experts of a model, and which ranks share them
    expert_places.py      which ranks have which experts, where no ds_config says it
    expert_files.py       the files of experts
    expert_shells.py      the same of a target
    read.py               the manifest
    pipeline.py           stages and files of layers become one model
    tensor_ranks.py       slices of tensor ranks become boxes of whole tensors
    tensor_rules.py       which dimension of a parameter was cut: --tp-rules
    universal_info.py     the same, as the checkpoint says it
    families.py           rules of known models, as data
    together.py           what model ranks have in common
    copies.py             whether their copies of a tensor are equal
    apart.py              all model ranks in one manifest, without joining them
    write.py              the same files for another data-parallel size, stage or type
    write_grid.py         those of several model ranks
    recut.py              the stages of a pipeline at other bounds
    optimizer_files.py    the optimizer files of a target
    regroup.py            a source for another expert-parallel size
    elastic.py            targets whose files any number of ranks loads
    gather.py             the engine's own rule for its partitions; gather_whole.py for stage 0

What DeepSpeed's universal checkpoints share with these files is in formats/deepspeed_states.
Facts in this package are of DeepSpeed 0.19.8 unless said otherwise; files back to 0.5.10 are read.
"""

from ..deepspeed_states import OBJECTS
from ..deepspeed_states.options import OF_RANKS, OPTIONS
from ..format import Format

FORMAT = Format(
    name="deepspeed",
    folder="deepspeed",
    about="DeepSpeed ZeRO stage 0, 1, 2, 3, 0.5.10 to 0.19.8",
    family="deepspeed",
    options=(*OPTIONS, *OF_RANKS),
    numbers=True,
    slices=True,
    gathers=True,
    groups="without_empty_groups",
    objects=OBJECTS,
)
