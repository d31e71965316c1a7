"""One model, two programs: the names and packings of Hugging Face and of Megatron-Core.

    rules.py        which tensors of one are which of the other, for each family: llama.json, ...
    sizes.py        heads and vocabulary, from the option, a configuration or Megatron's arguments
    layouts.py      shapes and fragments of the packings that the rules name
    matching.py     which rule knows a name, and in which direction a checkpoint goes
    translate.py    the manifest of one as the manifest of the other

Facts are of transformers 5.23 and megatron-core 0.16.1.
"""

from .translate import translated as translated
