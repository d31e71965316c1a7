"""What DeepSpeed's ranks all-gather, by the engine's own rule, for `verify --gather`.

model_rank.py   flat buffers and files of one model rank; its optimizer at stage 0
tensor.py       where the slices of tensor ranks belong
grid.py         all model ranks: stages of a pipeline, tensor ranks

These modules share only the parser of torch files with the reader, and the text of a family's rules
(`--tp-rules neox`), which a user could have written. They state again which file belongs to which
rank, which keys hold what, what a rule means and where a parameter begins, so that a proof does not
repeat a mistake of the reader. The reader runs first and refuses unknown or damaged files.
DeepSpeed 0.19.8.
"""

from .grid import partitions as partitions
