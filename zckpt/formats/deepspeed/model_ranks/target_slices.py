"""Cuts a full model for the tensor ranks of a target.

    1. The source has full tensors, with the rules by which they were cut.
    2. Each rank gets a manifest with the shapes of its slices, which determine its files.
    3. The files are read back by the same rules, which show where each slice is in its full tensor.

Each parameter is cut evenly, as the engine's layers cut it. The places of bytes in files come from
step 3, so no code here computes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from ....core.checkpoint import slicing
from ....core.checkpoint.facts import UNCUT, FlatBufferEngine, TensorParallel, Vocabulary
from ....core.checkpoint.manifest import Manifest, Parameter
from ....core.checkpoint.placement import TENSOR_RANK, Row, Shapes, Sliced, Table
from ....core.ranks.split import names_in, split
from ....errors import (
    MissingData,
    Notice,
    UnsupportedCheckpoint,
    WrongOption,
    counted,
    listed,
    warning,
)
from ....naming.auto_tp import AutoTP, heads_in, heads_shown
from ....naming.patterns import INFO
from ....naming.tensor_rules import shapes_by, stated_rule
from ....naming.ties import CONFIG
from ....naming.universal_info import UniversalInfo, info_for
from ....training.megatron_arguments import DIVISOR, PADDED, TENSOR_SIZES, arguments, with_sizes
from ....training.options import VOCAB_SIZE, Options
from ....training.trainers import files_to_load_by, json_of
from ...vocabulary import padded


def sized(source: Manifest, tp: int) -> Manifest:
    """Replaces the number of tensor ranks by `tp` in all settings of the source that state it.

    These are the program's saved arguments, `universal_checkpoint_info`, and AutoTP's size in the
    ds_config. The padded vocabulary size becomes the number of rows of the source's embeddings.
    """
    client = dict(source.state.get("client_state") or {})
    rows = [source.parameters[name].shape[0] for name in _vocabularies(source)]
    padded_size = {PADDED: max(rows)} if rows else {}
    if isinstance(client.get(INFO), Mapping):
        placements = _facts(source).placements.items()
        info = info_for(client[INFO], tp, [name for name, own in placements if own.is_replicated])
        client[INFO] = info | (padded_size if PADDED in info else {})
    engine = source.run.engine
    assert isinstance(engine, FlatBufferEngine)
    if is_auto(source):
        config = {**engine.config["tensor_parallel"], "autotp_size": tp}
        engine = replace(engine, config={**engine.config, "tensor_parallel": config})
    return source.replace(
        origin=replace(source.run.origin, tp=None, pp=None),
        engine=engine,
        tensor_parallel=None,
        state={
            **source.state,
            "client_state": with_sizes(client, dict.fromkeys(TENSOR_SIZES, tp) | padded_size),
        },
    )


# -- how parameters are cut


def slices_of(source: Manifest, tp: int) -> tuple[Table, list[Manifest], list[Notice]]:
    """Cuts the full model for `tp` tensor ranks.

    Returns a table of how each parameter is cut, one manifest per rank, and warnings. Raises
    MissingData if nothing states how a parameter is cut, UnsupportedCheckpoint if it cannot be cut
    evenly.
    """
    names = names_in(source)
    if tp == 1:  # not cut, whatever the rules
        table = Table(TENSOR_RANK, rows=[Row(names)])
        return table, split(sized(source, tp), table), []
    placements = _facts(source).placements
    if not source.parameters.keys() <= placements.keys():  # no rules, or rules for other names
        raise MissingData(
            "cuts-unknown",
            f"nothing says how the parameters of {source.root} are cut over tensor ranks",
            hint="give --like RUN, a run with the tensor ranks that you want; or convert the "
            "source --to deepspeed first, then run `zckpt reshard --tp N` with --tp-rules FILE, or "
            "with a model family such as --tp-rules llama",
            file=source.root,
        )
    whole = sized(source, tp)
    info = whole.state["client_state"].get(INFO)
    universal_info = UniversalInfo(info) if isinstance(info, Mapping) else None
    auto = auto_of(source) if is_auto(source) else None
    cuts: dict[str, Sliced] = {}
    rows: list[dict[str, tuple[int, ...]]] = [{} for _ in range(tp)]
    uneven = []
    for name, parameter in source.parameters.items():
        rules = [
            stated_rule(name, placements[name]),
            *([] if universal_info is None else [universal_info]),
        ]
        shapes = _candidates(name, parameter, tp, universal_info, auto)
        cut = shapes_by(rules, name, parameter.shape, shapes)
        if not cut:
            uneven.append(f"{name} {list(parameter.shape)} ({placements[name].text})")
            continue
        cuts[name] = cut[1]
        for row, shape in zip(rows, cut[0], strict=True):
            row[name] = shape or ()
    if uneven:
        raise UnsupportedCheckpoint(
            "sizes-do-not-fit",
            f"{source.root}: {counted(len(uneven), 'parameter')} cannot be cut evenly over {tp} "
            f"tensor ranks by the rules of the source: {listed(uneven, 4)}",
            hint="choose a --tp that divides the heads, the widths and the rows of the vocabulary",
            file=source.root,
        )
    table = Table(TENSOR_RANK, cuts, [Row(names, row) for row in rows])
    return table, split(whole, table), _doubts(auto, info)


def _candidates(
    name: str,
    parameter: Parameter,
    tp: int,
    universal_info: UniversalInfo | None,
    auto: AutoTP | None,
) -> Iterator[Shapes]:
    """The shapes to try, in this order, for the slices of the `tp` ranks."""
    # 1. the shapes that the source states, if it states them for `tp` ranks
    stated_shapes = None if universal_info is None else universal_info.stated_shapes(name)
    if stated_shapes is not None and len(stated_shapes) == tp:
        yield stated_shapes
    whole = parameter.shape
    yield [whole] * tp  # 2. the full shape on every rank
    # 3. the full shape cut along one axis: in AutoTP's shares, or in equal ones
    for axis, size in enumerate(whole):
        names = name, *parameter.aliases
        shares = slicing.even(size, tp) if auto is None else auto.shares(names, size, tp)
        if shares is not None:
            yield [(*whole[:axis], share, *whole[axis + 1 :]) for share in shares]


def _doubts(auto: AutoTP | None, info: Mapping[str, Any] | None) -> list[Notice]:
    if auto is None or auto.heads or "affine_map" in (info or {}):
        return []
    message = (  # AutoTP gives some ranks more heads if it cannot deal them evenly
        "each tensor rank gets an equal share of the attention: --tp must divide "
        "num_key_value_heads of the model, because AutoTP deals whole heads"
    )
    return [warning("cuts-unknown", message, subject="num_key_value_heads")]


# -- rows of a vocabulary


def rows_of(source: Manifest, tp: int, options: Options) -> dict[str, int]:
    """The number of rows of each vocabulary parameter in the target: {"embed.weight": 50304}.

    As Megatron does, the used rows are rounded up to a multiple of `tp` times the saved argument
    `make_vocab_size_divisible_by`. `--vocab-size` replaces the number of used rows; WrongOption if
    there are no such parameters. {} for AutoTP without this option.
    """
    divisor = arguments(source.state.get("client_state")).get(DIVISOR)
    unit = divisor if isinstance(divisor, int) and divisor > 0 else None
    given, facts = options[VOCAB_SIZE], _vocabularies(source)
    if given is not None and not facts:
        raise WrongOption(
            "option-not-applicable",
            f"--vocab-size does not apply to {source.root}: no rule says which weights have the "
            "rows of a vocabulary",
            hint="give these weights a rule `vocab:N` in --tp-rules FILE; N is the number of rows "
            "that are not padding",
        )
    if given is None and facts and is_auto(source):
        return {}  # AutoTP pads nothing: the ranks' shares differ by one row
    before, rows = source.run.origin.tp or 1, dict[str, int]()
    for name, about in facts.items():
        # without the argument, a source with more padding than its own ranks need keeps its rows
        is_rounded = about.rows == -(-about.used // before) * before
        keeps = unit is None and given is None and not about.rows % tp and not is_rounded
        least = padded(source.root, name, about.used, given, tp * (unit or 1))
        rows[name] = about.rows if keeps else least
    return rows


def _vocabularies(source: Manifest) -> dict[str, Vocabulary]:
    facts = _facts(source).vocabularies
    # without parameters that the user has renamed
    return {name: about for name, about in facts.items() if name in source.parameters}


def _facts(source: Manifest) -> TensorParallel:
    return source.run.tensor_parallel or UNCUT


# -- AutoTP


def is_auto(source: Manifest) -> bool:
    """Whether the source's ds_config is of a run with AutoTP."""
    assert isinstance(source.run.engine, FlatBufferEngine)
    return isinstance((source.run.engine.config or {}).get("tensor_parallel"), Mapping)


def auto_of(source: Manifest) -> AutoTP:
    """How much of each parameter a tensor rank gets with AutoTP, DeepSpeed's automatic slicing.

    It depends on the number of key-value heads, which config.json beside the source states. Without
    that file, zckpt infers the number if the source's tensor ranks have slices of different sizes.
    """
    heads = heads_in(json_of(files_to_load_by(source.files.siblings), CONFIG))
    if heads is None:
        universal_info = UniversalInfo((source.state.get("client_state") or {}).get(INFO) or {})
        parameters = source.parameters.items()
        shapes = (
            ((n, *own.aliases), universal_info.stated_shapes(n) or ()) for n, own in parameters
        )
        heads = heads_shown(shapes)
    return AutoTP(heads)
