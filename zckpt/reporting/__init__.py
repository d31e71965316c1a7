"""`zckpt report`: what a checkpoint is, as one JSON document, and as a page made of that alone.

document.py     the document of a checkpoint or a run
probes.py       the document of `probe-diff`, which has section 6 alone
measuring.py    one pass over all tensors
summary.py      section 1: what it is, in one line, and what a trainer says of it
next_steps.py   what can be done with it: resume, or after damage what is left
numbers.py      section 2: the table of tensors, and numbers of layers by kinds
byte_map.py     section 3: which file has which elements
masters.py      section 4: how far 16-bit weights are from their masters
steps.py        section 5: every place that states a step, and the groups
against.py      section 6: another checkpoint
run.py          section 7: the checkpoints of a run
faults.py       what is wrong, worst first
page/           HTML, SVG and Markdown from the document
"""
