"""Names and tensors that `save_pretrained` of transformers writes for a model.

Since version 5, the names and tensors of a model in memory differ from those in its files. For
example, the experts of a layer are one stacked tensor in memory, and one tensor each in the file.
transformers converts them when it loads, and back when it saves. So files keep the names that older
versions, vLLM and converters to GGUF read.

    table.json      transformers' own rules, reversed, and the submodels of every model class
    rules.py        the rules for a model, by its configuration
    steps.py        the operations that rules apply to tensors
    translate.py    converts a manifest to the names of files
    modules.py      converts a manifest of files to the names of modules, for `verify` and `diff`

The table is generated: `python -m tests.saved_names > zckpt/naming/saving/table.json`. A test
compares it with the installed transformers.
"""

from .modules import spelled_as as spelled_as
from .translate import as_saved as as_saved
