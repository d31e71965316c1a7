"""What `save_pretrained` of transformers makes of a model's tensors: other names, cuts and joins.

Since version 5 modules have other names than files: the experts of a layer are one stacked tensor,
and vision models are called alike. On save transformers reverses what it does on load, so that
files stay as older versions, vLLM and converters to GGUF read them.

    table.json      transformers' own rules, reversed, and the models inside of every model
    rules.py        which rules are for a model, by its configuration
    steps.py        what rules do with tensors
    translate.py    a manifest under the names of files
    modules.py      a manifest of files under the names of modules, for `verify` and `diff`

The table is generated: `python -m tests.saved_names > zckpt/naming/saving/table.json`. A test
compares it with the installed transformers.
"""

from .modules import spelled_as as spelled_as
from .translate import as_saved as as_saved
