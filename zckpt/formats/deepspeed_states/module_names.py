"""Maps the parameter names that a model file lists to the names of the module's weights.

The engine lists `named_parameters()`, whose names contain the words of torch's checkpoint_wrapper.
The names in a module's state dict do not (DeepSpeed 0.19.8, torch 2.13).
"""

from __future__ import annotations

from typing import Any

from ...naming.names import respelled

SHAPES = ("frozen_param_shapes", "frozen_param_fragments")


def as_in_module(model: dict[str, Any]) -> dict[str, Any]:
    """Replaces names in a model file's lists, such as `param_shapes`, by those in its `module`.

    `module` is the state dict. Returns a changed copy, or `model` itself if no name changes.
    """
    groups = model.get("param_shapes")
    if not isinstance(module := model.get("module"), dict) or not isinstance(groups, list):
        return model
    listed = [name for group in groups for name in group]
    listed += [name for key in SHAPES for name in model.get(key) or ()]
    listed += model.get("buffer_names") or ()
    if all(name in module for name in listed):
        return model
    names = respelled([name for name in listed if isinstance(name, str)], [*module])
    if all(old == new for old, new in names.items()):
        return model
    changed: dict[str, Any] = {"param_shapes": [_under(group, names) for group in groups]}
    changed |= {key: _under(shapes, names) for key in SHAPES if (shapes := model.get(key))}
    if buffers := model.get("buffer_names"):
        changed["buffer_names"] = [names.get(name, name) for name in buffers]
    if shared := model.get("shared_params"):
        changed["shared_params"] = {
            names.get(alias, alias): names.get(owner, owner) for alias, owner in shared.items()
        }
    return {**model, **changed}


def _under(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return type(values)((names.get(name, name), value) for name, value in values.items())
