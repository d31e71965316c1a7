"""Names and tensors that `save_pretrained` of transformers writes for a model.

Since version 5 the names of a model's modules differ from the names in its files: for example, the
experts of a layer are one stacked tensor in the model, and vision models use the same names. When
it saves, transformers reverses what it does when it loads. So files keep the names that older
versions, vLLM and converters to GGUF read.

    table.json      transformers' own rules, reversed, and the inner models of every model class
    rules.py        the rules for a model, by its configuration
    steps.py        the operations of rules on tensors
    translate.py    converts a manifest to the names of files
    modules.py      converts a manifest of files to the names of modules, for `verify` and `diff`

The table is generated: `python -m tests.saved_names > zckpt/naming/saving/table.json`. A test
compares it with the installed transformers.
"""

from .modules import spelled_as as spelled_as
from .translate import as_saved as as_saved
