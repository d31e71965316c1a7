"""DeepSpeed's ZeRO-1, 2 and 3 directories, as engine.save_checkpoint writes them.

    <run>/latest                                              the tag, as text
    <run>/<tag>/mp_rank_00_model_states.pt                    stage 1, 2: weights, buffers, counters
    <run>/<tag>/zero_pp_rank_R_mp_rank_00_model_states.pt     stage 3: one per rank, weights empty
    <run>/<tag>/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   R is the data-parallel rank

    directory.py    which files there are, and what is refused by their names
    ranks.py        what the ranks' files say, and whether they say the same
    flats.py        the flat buffers of fp32 masters and optimizer states
    reading.py      the manifest of it all

Facts in this package are of DeepSpeed 0.19.8 unless said otherwise; files back to 0.5.10 are read.
"""

from .directory import detect
from .reading import read

__all__ = ["detect", "read"]
