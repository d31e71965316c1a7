"""One model in two programs: the names and packings of Hugging Face and Megatron-Core.

    rules.py        pairs of tensors in both programs, for each family: llama.json, ...
    sizes.py        heads and vocabulary, from the option, a configuration or Megatron's arguments
    layouts.py      shapes and fragments of the packings that the rules name
    matching.py     finds the rule for a name, and the direction of a conversion
    translate.py    converts one program's manifest to the other program's

Facts are of transformers 5.23 and megatron-core 0.16.1.
"""

from .translate import translated as translated
