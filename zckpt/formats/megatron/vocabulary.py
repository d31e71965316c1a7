"""Computes the number of vocabulary rows in the run that loads the target.

Megatron-LM rounds the tokenizer's number of tokens up to a multiple of the tensor ranks times
`make_vocab_size_divisible_by`. Megatron-Core (0.16.1) also loads a checkpoint with another number
of rows: it loads the rows that both the checkpoint and the run have. Padding rows that the source
lacks become zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ...core.checkpoint.manifest import Manifest
from ...errors import MissingData, WrongOption
from ...training.megatron_arguments import DIVISOR, PADDED, with_sizes
from ...training.options import LIKE, TP, VOCAB_SIZE, Options
from ..vocabulary import padded, resized
from .common_state import arguments
from .manifest import size_of

WEIGHTS = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")


def for_tensor_ranks(source: Manifest, options: Options) -> Manifest:
    """Resizes the vocabulary for a run with `--tp` tensor ranks and `--vocab-size` tokens.

    With neither option, the source is returned unchanged. Raises WrongOption if the options do not
    apply to the source. Raises MissingData if `--vocab-size` is needed to divide the rows among the
    ranks.
    """
    kept = source.state.get("megatron")
    names = [name for name in WEIGHTS if name in source.parameters]
    flags = [each.flag for each in (TP, VOCAB_SIZE) if options[each] is not None]
    if not flags or not isinstance(kept, dict):
        return source
    if options[LIKE] is not None or not names:
        why = (
            "the run of --like decides how many rows the vocabulary has"
            if names
            else f"{source.root} has no vocabulary"
        )
        raise WrongOption(
            "option-not-applicable", f"{flags[0]} has no use here: {why}", hint="leave it out"
        )
    args = arguments(kept.get("common"))
    rows = {source.parameters[name].shape[0] for name in names}
    if len(rows) > 1:
        raise WrongOption(
            "option-not-applicable",
            f"{flags[0]} does not apply to {source.root}: its embedding and its output layer have "
            "different numbers of rows",
            hint="leave it out: Megatron-Core loads other numbers of rows too",
        )
    wanted = _rows(source.root, rows.pop(), kept, args, options)
    common = with_sizes(kept["common"], {PADDED: wanted})
    vocabulary = {**(kept.get("vocabulary") or {}), "rows": wanted}
    changed = {**kept, "common": common, "vocabulary": vocabulary}
    model = resized(source, dict.fromkeys(names, wanted))
    return replace(model, state={**source.state, "megatron": changed})


def _rows(
    root: str, rows: int, kept: Mapping[str, Any], args: Mapping[str, Any], options: Options
) -> int:
    """The number of vocabulary rows in the run that loads the target, with padding.

    `rows` is the source's number; `kept` is the source's Megatron-Core state, `args` its arguments.
    """
    used = (kept.get("vocabulary") or {}).get("used")
    given, tp = options[VOCAB_SIZE], options[TP]
    if tp is None:
        tp = size_of(args, "tensor_model_parallel_size") or 1
    unit = size_of(args, DIVISOR)
    if given is None and (unit is None or used is None) and not rows % tp:
        return rows
    if given is None and used is None:
        raise MissingData(
            "option-needed",
            f"{root} does not state how many of the {rows} rows of the vocabulary its tokenizer "
            f"uses, and {rows} rows cannot be divided evenly among {tp} tensor ranks",
            hint="give the tokenizer's number of tokens: --vocab-size N",
            file=root,
        )
    return padded(root, WEIGHTS[0], used or 0, given, tp * (unit or 1))
