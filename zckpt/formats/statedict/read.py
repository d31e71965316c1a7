"""Finds models and optimizers in state dicts, names their parameters, and builds the manifest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ...core.checkpoint.manifest import Manifest
from ...core.checkpoint.states import BESIDE_STATE, OF_NO_GROUP
from ...core.storage.filenames import number_of
from ...errors import InconsistentCheckpoint, MissingData, listed, note, warning
from ...naming import peft
from ...naming.names import names_in
from ...training import lightning
from ...training.trainers import config_of, of_model
from ..extra_states import NO_NAMES, ExtraState
from ..reading import USUAL, Reading
from .building import ManifestBuilder
from .keys import is_optimizers_key, keys_of
from .names import names_of, refuse_twice
from .refusals import refuse_flat_states, refuse_parts, refuse_tree, refuse_unnamed_parts
from .roots import SOLE, Root, Roots, roots_of
from .slices import (
    omit_parts,
    omit_slices,
    refuse_states,
    refuse_weights,
    taken_of_rank_0,
)
from .state_dict_search import (
    NamedModel,
    OptimizerState,
    beside,
    choose_models,
    find_models,
    find_optimizers,
    is_optimizer,
    read_optimizer,
    value_at,
    without,
)
from .tree import Leaf, SavedTree, TreePath, dotted

ADDRESSES = 1 << 24
NO_OPTIMIZER = note(
    "option-without-effect",
    "--param-names is not used, because the checkpoint has no optimizer",
    subject="--param-names",
)


def manifest(saved: SavedTree, reading: Reading = USUAL) -> Manifest:
    """Builds the manifest of a checkpoint from its state dicts.

    `reading.root` chooses one of several models; without it, all are read, and names begin with
    their model's key. If numbered parameters have no names, `weights_only` skips the optimizer, and
    `nameless` keeps it uninterpreted.

    Raises InconsistentCheckpoint, MissingData (no model, or no names), WrongOption (no model
    `root`), AmbiguousCheckpoint (unclear which optimizer trains a model).
    """
    refuse_tree(saved.tree, saved.root)
    different = saved.ranks.different
    key_beside = _separate(saved)
    optimizers = {
        path: read_optimizer(value_at(saved.tree, path)) for path in find_optimizers(saved.tree)
    }
    every = omit_slices(saved, find_models(saved.tree, optimizers), optimizers)
    name = (reading.root or "").partition("=")[0]
    paths = choose_models(saved, every, list(optimizers.values()), name)
    models = {path: every[path] for path in paths}
    other_models = beside(every, paths)
    gone = omit_parts(saved, models, optimizers)
    taken = [item for item in different if not any(item.path[: len(p)] == p for p in gone)]
    saved.omitted[:0] = taken_of_rank_0(taken)
    if not reading.weights_only:
        refuse_flat_states(saved, [*models.values()], optimizers)
    _settle_averages(saved, paths[0])
    if name in map(dotted, other_models):
        roots_of_saved = roots_of(saved, models, optimizers).and_weights(other_models, optimizers)
        roots = _several(saved, roots_of_saved, reading)
        models |= other_models
    elif len(models) == 1 and len(optimizers) < 2:
        roots = [Root(dotted(paths[0]) or SOLE, paths[0], tuple(optimizers))]
    else:
        roots = _several(saved, roots_of(saved, models, optimizers), reading)
        saved.warnings += [
            warning(
                "root-inferred",
                f"{name} is read without an optimizer: nothing shows that {key} trains it; if it "
                f"does, add --root {name}={key}",
                subject=key,
            )
            for key in roots[0].likely
        ]
    if reading.weights_only:
        left = [dotted(path) for path in other_models if path not in models]
        saved.omitted += [
            note(
                "weights-omitted",
                f"{key}: tensors beside the model; to read them instead, add --root {key}",
                subject=key,
            )
            for key in left
        ]
    if name in (roots[0].name, dotted(roots[0].model)) and name:
        saved.origin = replace(saved.origin, root=name)
    named = [_named(saved, root, models[root.model], optimizers, reading) for root in roots]
    result = ManifestBuilder(saved, roots, named, reading).build()
    engine = keys_of(result.run.engine)
    if key_beside and engine.optimizer == (key_beside,):
        engine = replace(engine, optimizer=())
    pairs = [(root.prefix, optimizers[path]) for root in roots for path in root.optimizers]
    unused = not optimizers and reading.param_names is not None
    return result.replace(
        engine=engine,
        share=_share(saved, pairs, reading),
        is_numbered=any(optimizer.is_numbered for _, optimizer in pairs),
        notes=(NO_OPTIMIZER,) if unused else (),
    )


def _settle_averages(saved: SavedTree, model: TreePath) -> None:
    """Adds a warning if the weights at the path `model` are averages that Lightning saved.

    If `model` is the path of the trained weights, removes the averages from the tree, with a note.
    Does nothing for checkpoints without such averages.
    """
    whole_model, trained = lightning.WHOLE.model, lightning.TRAINED
    if not {lightning.LIGHTNING, trained} <= saved.tree.keys():
        return
    averages = [str(whole_model[0]), lightning.AVERAGING]
    if model == whole_model:
        message = (
            f"{averages[0]} has averages of the weights, and {trained} has the weights that the "
            f"optimizer updates; to read these instead, add --root {trained}"
        )
        saved.warnings.append(warning("root-inferred", message, subject=trained))
        return
    saved.tree = {key: value for key, value in saved.tree.items() if key not in averages}
    message = f"{listed(averages)}: --root selects {trained}"
    saved.omitted.append(note("weights-omitted", message, subject=averages[0]))


def _separate(saved: SavedTree) -> str:
    """Splits a dictionary `{**model, **optimizer}`: the optimizer's keys move below a new key.

    Returns the new key, such as "optim"; "" if the dictionary does not mix model and optimizer.
    """
    tree = saved.tree
    if not is_optimizer(tree):
        return ""
    optimizer = {key: value for key, value in tree.items() if is_optimizers_key(key)}
    rest = {key: value for key, value in tree.items() if key not in optimizer}
    if not any(isinstance(value, Leaf) for value in rest.values()):
        return ""
    new_key = "optim"
    while new_key in rest:
        new_key += "_"
    saved.tree = {**rest, new_key: optimizer}
    saved.ranks.steps = [
        replace(item, path=(new_key, *item.path)) if is_optimizers_key(item.path[0]) else item
        for item in saved.ranks.steps
    ]
    saved.ranks.different = [
        replace(item, path=(new_key, *item.path)) if is_optimizers_key(item.path[0]) else item
        for item in saved.ranks.different
    ]
    return new_key


def _several(saved: SavedTree, roots: Roots, reading: Reading) -> list[Root]:
    """Selects the model that `--root` names, or all models; each with its optimizers.

    Other models and optimizers are removed from the tree of state dicts.
    """
    if reading.root is None:
        saved.warnings += [
            warning(
                "root-inferred",
                f"{dotted(path)} is kept as the program's own state, not as optimizer state: "
                "nothing shows which model this optimizer trains",
                subject=dotted(path),
            )
            for path in roots.unclear
        ]
        saved.warnings += roots.doubts
        return list(roots.roots)
    chosen = roots.asked(reading.root, reading.weights_only)
    every = [path for root in roots.roots for path in root.optimizers]
    lost = [dotted(path) for path in every if path not in chosen.optimizers]
    if lightning.LIGHTNING in saved.tree and chosen.optimizers and lost:
        message = (
            f"{lightning.NAME} assigns saved optimizer states by their order: a module that also "
            f"has {listed(lost)} cannot resume from the target"
        )
        saved.warnings.append(warning("program-must-set", message, subject=lost[0]))
    saved.omitted += roots.omitted(chosen)
    if saved.layout.models:
        saved.files.siblings, sibling_names = of_model(saved.files.siblings, number_of(chosen.name))
        message = f"{listed(sibling_names)}: --root selects {chosen.name}"
        saved.omitted += (
            [note("weights-omitted", message, subject=sibling_names[0])] if sibling_names else []
        )
    saved.tree = without(saved.tree, roots.paths - {chosen.model, *chosen.optimizers})
    if chosen.by_words:
        message = (
            f"{dotted(chosen.optimizers[0])} is read as the optimizer of {chosen.name}, because "
            f"of its name; to choose another, add --root {chosen.name}=OPTIMIZER"
        )
        saved.warnings.append(warning("root-inferred", message, subject=chosen.name))
    return [chosen]


def _named(
    saved: SavedTree,
    root: Root,
    state_dict: Mapping[Any, Any],
    optimizers: Mapping[TreePath, OptimizerState],
    reading: Reading,
) -> NamedModel:
    """Gives the parameters of one model (`root`) and of its optimizers their names.

    `state_dict` has the model's tensors by key. `optimizers` has the optimizers of all models.
    """
    optimizers_of_root = {path: optimizers[path] for path in root.optimizers}
    param_names = names_in(reading.param_names, root.prefix)
    facts = saved.facts_of(root.model)
    changed = _names_with_adapter(
        saved, facts, state_dict, optimizers_of_root.values(), param_names
    )
    weights = {changed.get(name, name): leaf for name, leaf in state_dict.items()}
    model = NamedModel(weights, facts, bool(changed), root.prefix)
    model.inferred += (facts or {}).get("inferred", ())
    is_one = not root.prefix and len(optimizers_of_root) == 1
    names = dict(zip(map(str, state_dict), weights, strict=True))

    def refuse_slices(listed: Collection[str] | None) -> None:
        refuse_weights(
            saved, root.model, names, weights, optimizers_of_root, listed, reading.buffers
        )

    names_by_path: dict[TreePath, Mapping[Any, str]] = {path: {} for path in optimizers_of_root}
    trained: list[str] = []
    for path, optimizer in optimizers_of_root.items():
        refuse_twice(saved, [str(m) for members in optimizer.members for m in members])
        try:
            name_of = names_of(saved, model, optimizer, param_names)
            members = [name_of[m] for members in optimizer.members for m in members]
            refuse_twice(saved, [*trained, *members])
        except (MissingData, InconsistentCheckpoint) as error:
            refuse_slices(None)
            if not reading.weights_only:
                refuse_states(saved, path, optimizer, {})
            refuse_unnamed_parts(saved, weights, optimizer, reading.weights_only)
            may_lack = reading.weights_only or (reading.nameless and param_names is None)
            if is_one and not (may_lack and isinstance(error, MissingData)):
                raise
            if not (is_one and reading.weights_only):
                way = "; to read it, add --param-names FILE with its names" if is_one else ""
                key = dotted(path) or "the optimizer"
                message = f"{key} is kept as the program's own state: {error}{way}"
                model.warnings.append(warning(error.code, message, subject=key))
            continue
        names_by_path[path] = name_of
        whole = value_at(saved.tree, path) if path else {}  # or the optimizer is the full tree
        model.extra_states += [
            ExtraState(key, value, NO_NAMES, (root.prefix + name_of[key],))
            for key, value in optimizer.other_values.items()
            if key in name_of
        ]
        for values, is_known, reason in (
            (optimizer.other_values, name_of.__contains__, OF_NO_GROUP),
            (optimizer.state, name_of.__contains__, OF_NO_GROUP),
            (whole, is_optimizers_key, BESIDE_STATE),
        ):
            extra_states = [key for key in values if not is_known(key)]
            model.extra_states += [ExtraState(key, values[key], reason) for key in extra_states]
        trained += members
        prefixed = {member: root.prefix + name for member, name in name_of.items()}
        model.optimizers[path] = optimizer.renamed(prefixed)
    all_named = optimizers_of_root and len(model.optimizers) == len(optimizers_of_root)
    refuse_slices(trained if all_named else None)
    for path, optimizer in optimizers_of_root.items():
        if path in model.optimizers:
            states = optimizer.renamed(names_by_path[path])
            refuse_parts(saved, weights, states, reading.weights_only)
        if not reading.weights_only:
            refuse_states(saved, path, optimizer, names_by_path[path])
    if not root.prefix:
        return model
    return replace(
        model,
        weights={root.prefix + name: leaf for name, leaf in weights.items()},
        inferred=[root.prefix + name for name in model.inferred],
        warnings=[replace(line, message=f"{root.name}: {line.message}") for line in model.warnings],
    )


def _share(
    saved: SavedTree, optimizers: Sequence[tuple[str, OptimizerState]], reading: Reading
) -> str:
    """A clause on why an optimizer seems to be only one rank's share; "" if nothing shows this.

    `optimizers` are pairs of a model's prefix and an optimizer.
    """
    # Lightning numbers frozen weights too, and saves no share. A user who names what the optimizer
    # lists has stated that this is all. Shapes show nothing: a share's shapes fit the numbers as
    # well
    if lightning.LIGHTNING in saved.tree:
        return ""
    unnamed = (o for prefix, o in optimizers if names_in(reading.param_names, prefix) is None)
    return next(filter(None, map(_gaps, unnamed)), "")


def _gaps(optimizer: OptimizerState) -> str:
    """A clause that lists the parameter numbers missing in an optimizer's groups; "" if none.

    torch numbers parameters without gaps. Before torch 1.5, the numbers were addresses in memory.
    """
    numbers = sorted(m for members in optimizer.members for m in members if type(m) is int)
    if not optimizer.is_numbered or numbers[-1] >= ADDRESSES:
        return ""
    missing = sorted({*range(numbers[-1])}.difference(numbers))
    return f"its groups lack the parameter numbers {listed(missing, 8)}" if missing else ""


def _names_with_adapter(
    saved: SavedTree,
    facts: Mapping[str, Any] | None,
    model: Mapping[Any, Any],
    optimizers: Iterable[OptimizerState],
    param_names: Sequence[str] | None,
) -> Mapping[str, str]:
    """Maps names in PEFT's files to the module's: `lora_A.weight` to `lora_A.default.weight`.

    The adapter's name comes from names in the optimizers, in `param_names`, or in `facts` that
    zckpt wrote; without such names it is `default`.
    """
    known_names = [*(param_names or ()), *(facts or {}).get("numbers", ())]
    for optimizer in optimizers:
        known_names += [
            name for group in optimizer.groups for name in group.get("param_names") or ()
        ]
        known_names += [str(name) for members in optimizer.members for name in members]
    names = [str(name) for name in model]
    return peft.module_names(names, known_names, config_of(saved.files.siblings, peft.CONFIG))
