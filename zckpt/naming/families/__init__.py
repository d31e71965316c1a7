"""Converts models between Hugging Face and Megatron-Core: names, and fused weights such as qkv.

    rules.py        which tensors correspond in both programs, per family: llama.json, ...
    sizes.py        heads and vocabulary, from the option, a configuration or Megatron's arguments
    layouts.py      fuses and splits tensors (packings), such as q, k and v
    matching.py     finds the rule for a name, and the direction of a conversion
    translate.py    converts the manifest of one program to that of the other

Facts are of transformers 5.23 and megatron-core 0.16.1.
"""

from .translate import translated as translated
