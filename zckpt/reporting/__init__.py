"""`zckpt report`: describes a checkpoint in one JSON document, from which a page is made.

document.py     makes the document about a checkpoint or a run
probes.py       makes the document for the page of `probe-diff`
measuring.py    measures all tensors in one pass
summary.py      section 1: the checkpoint in one line, and what the trainer's files state
next_steps.py   what the user can do: resume, or after damage, use what is left
numbers.py      section 2: the table of tensors, and a number per layer and kind of tensor
byte_map.py     section 3: which file stores which elements
masters.py      section 4: how far 16-bit weights are from their masters
steps.py        section 5: every place that stores a step, and the groups
against.py      section 6: the comparison with another checkpoint
run.py          section 7: the checkpoints of a run over time
faults.py       what is wrong, worst first
page/           HTML, SVG and Markdown from the document
"""
