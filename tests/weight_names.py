"""Which weights `from_pretrained` of the installed transformers asks for, by class, as a table.

python -m tests.weight_names > zckpt/naming/weights.json

A weight is listed if a class has it with its default configuration, and with each of its switches
in the other position: whoever lacks it lacks a part of the model. `#` is the number of a layer.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .saved_names import CHANGES, classes, empty

NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
MOST, FEW = 12, 2  # layers of a model, and of one with another switch: kinds of layers alternate
OPTIONAL = re.compile(r".*(rank|experts?)")
"""Numbers that may be 0 or null: without them a model has other weights."""
NO_SWITCHES = (
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "use_cache",
    "is_decoder",
)


def configurations(cls: Any) -> Iterator[Any]:
    """The default one, and one for each switch that is set otherwise."""

    def usual() -> Any:
        config = cls.config_class()
        if change := CHANGES.get(config.model_type):
            change(config)
        return config

    first = usual()
    text = first.get_text_config()
    if getattr(text, "layer_types", None) is None and getattr(text, "num_hidden_layers", 0) > MOST:
        text.num_hidden_layers = MOST
    yield first
    for key, value in vars(text).items():
        if key.startswith("_") or key in NO_SWITCHES:
            continue
        if type(value) is bool:
            values: list[Any] = [not value]
        elif type(value) is int and OPTIONAL.fullmatch(key):
            values = [None, 0]
        else:
            continue
        for other in values:
            config = usual()
            inner = config.get_text_config()
            try:
                setattr(inner, key, other)
                if getattr(inner, "layer_types", None) is None:
                    inner.num_hidden_layers = FEW
            except Exception:  # no such model
                continue
            yield config


def names_of(model: Any) -> set[str]:
    """The patterns of weights; one in a layer only if every layer has it.

    None of modules whose numbers have gaps: what a Sequential has there depends on more than its
    length.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: set[str] = set()
    layers: dict[str, set[int]] = {}
    of: dict[str, set[int]] = {}
    for name in names:
        numbers = [*NUMBER.finditer(name)]
        if not numbers:
            found.add(name)
        elif len(numbers) == 1:
            before, after = name[: numbers[0].start()], name[numbers[0].end() :]
            layers.setdefault(before, set()).add(int(numbers[0][0]))
            of.setdefault(f"{before}#{after}", set()).add(int(numbers[0][0]))
        else:
            before = name[: numbers[0].start()]
            layers.setdefault(before, set()).add(int(numbers[0][0]))
    full = {before for before, numbers in layers.items() if numbers == {*range(len(numbers))}}
    return found | {
        key
        for key, numbers in of.items()
        if (before := key.partition("#")[0]) in full and numbers == layers[before]
    }


def of_class(cls: Any) -> set[str]:
    configs = configurations(cls)
    found = names_of(empty(cls, next(configs)))
    for config in configs:
        try:
            model = empty(cls, config)
        except Exception:  # no such model
            continue
        found &= names_of(model)
    return found


def tree(names: set[str]) -> dict[str, Any]:
    """The names as dictionaries, by the words between dots; what ends a name has none."""
    found: dict[str, Any] = {}
    for name in sorted(names):
        inner = found
        for word in name.split("."):
            inner = inner.setdefault(word, {})
    return found


def table() -> dict[str, Any]:
    import transformers

    warnings.simplefilter("ignore")
    alike: dict[str, dict[str, Any]] = {}
    for name, cls in classes().items():
        try:
            names = of_class(cls)
        except Exception as error:
            print(f"{name}: {error!r}"[:200], file=sys.stderr)
            continue
        prefix = cls.base_model_prefix
        if names:
            about = {"prefix": prefix, "weights": tree(names)}
            alike.setdefault(json.dumps(about), {"classes": [], **about})["classes"].append(name)
    made_by = "python -m tests.weight_names, from the classes of transformers (Apache-2.0)"
    return {
        "made_by": made_by,
        "transformers": transformers.__version__,
        **shared(list(alike.values())),
    }


def shared(models: list[dict[str, Any]]) -> dict[str, Any]:
    """Models whose common parts stand once, in `parts`: a number instead of a tree is one's place.

    The parts in a part stand in front of it.
    """
    times: Counter[str] = Counter()

    def count(tree: dict[str, Any]) -> None:
        times[json.dumps(tree)] += 1
        if times[json.dumps(tree)] == 1:
            for inner in tree.values():
                count(inner)

    for model in models:
        count(model["weights"])
    parts: list[Any] = []
    places: dict[str, int] = {}

    def put(tree: dict[str, Any]) -> Any:
        key = json.dumps(tree)
        if key not in places:
            written = {word: put(inner) for word, inner in tree.items()}
            if not tree or times[key] == 1:
                return written
            places[key] = len(parts)
            parts.append(written)
        return places[key]

    return {"models": [{**model, "weights": put(model["weights"])} for model in models]} | {
        "parts": parts
    }


def text(document: dict[str, Any]) -> str:
    """The table as JSON, with a line for each part and each model."""
    lists = [
        f'"{name}": [\n'
        + ",\n".join(json.dumps(item, separators=(",", ":")) for item in document.pop(name))
        + "\n]"
        for name in ("parts", "models")
    ]
    return f"{json.dumps(document)[:-1]}, {', '.join(lists)}}}"


if __name__ == "__main__":
    print(text(table()))
