"""The tensors that DeepSpeed's own all-gather makes of the ranks' files, for `verify --gather`.

    model_rank.py   flat buffers and files of one model rank; its optimizer in stage 0
    tensor.py       the places of tensor ranks' slices in full tensors
    grid.py         all model ranks: stages of a pipeline, tensor ranks

These modules share only two things with the reader: the parser of torch files, and the text of a
model family's rules (`--tp-rules neox`), which a user could have written. They define again which
file belongs to which rank, what each key contains, what a rule means and where a parameter begins.
So a proof does not repeat a mistake of the reader. The reader runs first and refuses unknown or
damaged files. DeepSpeed 0.19.8.
"""

from .grid import partitions as partitions
