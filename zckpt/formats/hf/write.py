"""Writes any manifest as a folder for `from_pretrained`: weights, and the files that load them.

    model.safetensors                                    if larger than --max-shard-size: several
    model-00001-of-00003.safetensors ...                 files and model.safetensors.index.json
    config.json, generation_config.json, tokenizer.json, chat_template.jinja, ...
    adapter_model.safetensors, adapter_config.json       instead, if PEFT trained an adapter

The files are those of `save_pretrained` (transformers 5.24, PEFT 0.21). If config.json ties several
names, the weight is saved once, under the name to which config.json ties the others. The names of
the module's tensors become the names that `save_pretrained` writes (naming/saving). An adapter is
saved without its base model. Files that only a trainer needs are left out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from math import prod
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ...core.checkpoint.dtypes import FLOATS, SIZES, TORCH_NAMES
from ...core.checkpoint.entries import Entry, Key
from ...core.checkpoint.manifest import Manifest, Parameter, Sibling
from ...core.checkpoint.optimizer_states import NO_STATES
from ...core.checkpoint.siblings import FOLLOW, SiblingList
from ...core.checkpoint.weights import agreement, weight_of
from ...core.comparison.masters import results_of
from ...core.passes.layout import Layout, Shell
from ...core.passes.plan import Match
from ...core.storage import sources
from ...errors import MissingData, Notice, UnsupportedCheckpoint, WrongOption, listed, literal, note
from ...files import safefile
from ...naming import peft, saving, ties, weights
from ...training.options import Options
from ...training.trainers import LOADED, files_to_load_by, json_of, without_folder
from .options import MODEL_CONFIG
from .read import INDEX, WEIGHTS


def lay_out(source: Manifest, options: Options) -> Layout:
    """Lays out the folder's files; raises MissingData if there is no configuration file."""
    writer = PretrainedWriter(source, options)

    def loading(path: str) -> str:
        if writer.adapter:
            return f"PeftModel.from_pretrained(base_model, {literal(path)})"
        classes = writer.config.get("architectures")
        name = classes[0] if isinstance(classes, list) and classes else None
        is_name = isinstance(name, str) and name.isidentifier()
        return f"{name if is_name else 'AutoModel'}.from_pretrained({literal(path)})"

    return Layout(
        writer.shells,
        writer.siblings,
        writer.omitted,
        writer.warnings,
        about=writer.about,
        loading=loading,
        source=writer.model,
    )


class PretrainedWriter(Struct, eq=False, dict=True):
    """Decides names, tensors and files of the folder before the first byte is written."""

    source: Manifest
    options: Options

    def __post_init__(self) -> None:
        source = self.source
        if other_adapters := peft.other_adapters(source.parameters):
            raise WrongOption(
                "target-unsupported",
                f"the source has the adapter {listed(other_adapters)}, but zckpt export writes "
                f"only an adapter called {peft.ADAPTER}",
                hint="if the source has only this adapter, rename the adapter: --rename "
                f"'\\.{other_adapters[0]}(\\.|$)=.{peft.ADAPTER}\\1'",
            )
        parameters = source.parameters.values()
        self.adapter = any(map(peft.is_adapters, source.parameters))
        self._is_alone = peft.is_adapter_alone(
            {*source.parameters, *source.owners, *source.buffers}
        )
        self._shows_frozen = not all(parameter.trainable for parameter in parameters)
        self.files = self._files_to_load_by()
        self.config = self._config()
        settle = weights.settled_adapter if self.adapter else weights.settled
        settled = settle(source, self.config)
        self.source, self.is_asked = settled.source, settled.is_asked
        self.warnings = [*source.notices.warnings, *settled.warnings]
        source = self.source
        self.names = self._names()
        self.model = self._model()
        self.tensors = dict(self._tensors())
        if self.adapter:
            self._refuse_unknown_tuners()
        kept = {item.name for item in self.files}
        self.siblings = [(item.name, item) for item in self.files if item.name != self._config_name]
        names = [item.name for item in source.files.siblings]
        other_adapters = [name for name in names if without_folder(name) not in kept]
        self.omitted = [item for item in source.notices.omitted if item.code == "file-omitted"]
        self.omitted += self.refused
        if other_adapters:
            message = f"{', '.join(other_adapters)}: not needed to load the weights"
            self.omitted.insert(0, note("file-omitted", message, subject=other_adapters[0]))
        if base := [name for name in self.names if not self._is_exported(name)]:
            message = f"{listed(base, 4)}: weights of the base model, not the adapter"
            self.omitted.append(note("weights-omitted", message, subject=base[0]))

    # -- the files that load the weights

    @property
    def about(self) -> str:
        if self.adapter:
            return "an adapter for PEFT"
        return f"{'a model' if self.is_asked else 'weights'} for from_pretrained"

    @property
    def _config_name(self) -> str:
        return peft.CONFIG if self.adapter else ties.CONFIG

    def _files_to_load_by(self) -> list[Sibling]:
        """The files of configuration, tokenizer and processor, from the source or from `--config`.

        Files that are not copied, such as links that lead out of the folder, are noted in
        `refused`.
        """
        self.refused: list[Notice] = []
        files = {item.name: item for item in files_to_load_by(self.source.files.siblings)}
        path = self.options[MODEL_CONFIG]
        if path is None:
            return list(files.values())
        if sources.is_folder(path):
            inside = SiblingList(path)
            for name in sorted(filter(LOADED.fullmatch, os.listdir(path))):
                inside.add(name, os.path.join(path, name))
            files |= {item.name: item for item in inside.files}
            self.refused = inside.omitted
        elif sources.is_file(path):
            files[self._config_name] = Sibling(self._config_name, path, sources.size(path))
        else:
            raise WrongOption("option-names-nothing", f"--config {path} does not exist")
        return list(files.values())

    def _config(self) -> dict[str, Any]:
        """Reads config.json, or an adapter's configuration; raises MissingData without it."""
        config = json_of(self.files, self._config_name)
        if config is None:
            is_linked = any(each.subject == FOLLOW for each in self.source.notices.omitted)
            raise MissingData(
                "model-config-wrong",
                f"{self.source.root} has no {self._config_name}, without which from_pretrained "
                "cannot load the weights",
                hint="give that file, or a folder with it and the tokenizer: --config "
                + ("ADAPTER_FOLDER" if self.adapter else "BASE_MODEL_FOLDER")
                + (f"; or, if the file is behind a link, add {FOLLOW}" if is_linked else ""),
                file=self.source.root,
            )
        return config

    # -- weights

    def _names(self) -> list[str]:
        """The names of tensors to write, in the module's order; one name for each tied weight."""
        kept = self._owners()
        module = self.source.state.get("module") or []
        names = [*self.source.parameters, *self.source.buffers, *self.source.owners]
        places = {name: place for place, name in enumerate(module)}
        order = sorted(names, key=lambda name: places.get(name, len(places)))
        return [name for name in dict.fromkeys(order) if kept.get(name, name) == name]

    def _owners(self) -> dict[str, str]:
        """Maps second names of tied weights to the name under which the weight is saved.

        The configuration states the ties. If it names no class of model (`architectures`), but has
        `tie_word_embeddings`, the source's ties count too. Empty for an adapter.
        """
        if self.adapter:
            return {}
        tied = ties.of_config(self.config)
        of_source = self.source.owners
        names = {name: name for name in self.source.parameters} | of_source
        is_tied = not self.config.get("architectures") and self.config.get("tie_word_embeddings")
        owners = {**of_source} if is_tied else {}
        for alias, owner in tied.items():
            if {alias, owner} <= names.keys() and self._are_one(names[alias], names[owner]):
                owners[alias] = owner
        return owners

    def _are_one(self, one: str, other: str) -> bool:
        """Whether two names belong to one weight: the names or the tensors' bytes are equal.

        DCP files store a tied weight twice, so equal bytes count too.
        """
        if one == other:
            return True
        own_weight, its = (weight_of(self.source.entries, name) for name in (one, other))
        pairs = (own_weight.param, its.param), (own_weight.master, its.master)
        matches = [Match(a, b) for a, b in pairs if a and b and agreement(a, b) == "bits"]
        if len(matches) < sum(bool(a or b) for a, b in pairs):
            return False
        return not any(result.differs for result in results_of(self.source, matches))

    def _is_exported(self, name: str) -> bool:
        """Whether a tensor is written to the folder; always true for a full model.

        With an adapter, these are written: the adapter's own tensors, trained tensors of the base
        model, and tensors of the base model that PEFT saves with the adapter.
        """
        # AdaLoRA's `ranknum` is never saved
        if self.adapter and name.endswith(peft.RANKS):
            return False
        if not self.adapter or self._is_alone or peft.is_adapters(name):
            return True
        parameter = self.source.parameters.get(name)
        # without frozen parameters, as in weights alone, a source does not show what was trained
        trained = self._shows_frozen and parameter is not None and parameter.trainable
        return trained or peft.is_saved_base(name, self.config)

    def _refuse_unknown_tuners(self) -> None:
        """Raises UnsupportedCheckpoint if zckpt does not know how PEFT saves this kind of adapter.

        That is the case if a name in the written files cannot be mapped back to the module's name.
        """
        exported = {name for name in self.names if self._is_exported(name)}
        names = peft.module_names(self.tensors, config=self.config)
        if unknown := sorted(exported - {names.get(name, name) for name in self.tensors}):
            kind = self.config.get("peft_type")
            raise UnsupportedCheckpoint(
                "target-unsupported",
                f"zckpt does not know how PEFT saves {listed(unknown, 2)} ({kind})",
                hint="use `zckpt convert --weights-only`, which keeps the module's names",
            )

    def _model(self) -> Manifest:
        """The part of the source that is written: parameters and buffers, a tied weight only once.

        Names and shapes are those in the files; for an adapter, they are the module's.
        """
        source = self.source
        parameters: dict[str, Parameter] = {}
        entries: dict[Key, Entry] = {}
        owners = source.owners
        names = list(filter(self._is_exported, self.names))
        for name in names:
            owner = owners.get(name, name)
            if owner in source.parameters:
                parameters[name] = replace(source.parameters[owner], aliases=())
            for slot in ("param", "master"):
                if entry := source.entries.get((owner, slot)):
                    entries[name, slot] = replace(entry, parameter=name)
        model = source.replace(
            entries=entries,
            parameters=parameters,
            buffers=tuple(name for name in names if name not in parameters),
            replicas=(),
            inferred=(),
            state={"module": names},
            states=NO_STATES,
        )
        return model if self.adapter else saving.as_saved(model, self.config)

    def _tensors(self) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
        """Yields (name in the files, (type, shape)) for each tensor to write."""
        for name in self.model.state["module"]:
            weight = weight_of(self.model.entries, name)
            entry = weight.stored
            saved_name = peft.saved_name(name) if self.adapter else name
            yield saved_name, (self._dtype(name, entry.dtype, entry is weight.param), entry.shape)

    def _dtype(self, name: str, dtype: str, is_weight: bool) -> str:
        """The type in which a tensor is written; `dtype` is its type in the source.

        Only float parameters change: to the type of `--dtype`. Without `--dtype`, a master
        (`is_weight` is false) gets the module's type, if known, and a weight keeps its type.
        """
        if name not in self.model.parameters or dtype not in FLOATS:
            return dtype
        module = self.source.run.engine.dtype if self.source.run.engine else None
        return self.options.module_dtype or (dtype if is_weight else str(module or dtype))

    # -- files

    def shells(self) -> Iterator[Shell]:
        stem = (peft.WEIGHTS[0] if self.adapter else WEIGHTS).removesuffix(".safetensors")
        most = sys.maxsize if self.adapter else self.options.file_size  # an adapter is one file
        # large elements first, so that all are aligned
        names = sorted(self.tensors, key=lambda name: -SIZES[self.tensors[name][0]])
        parts = safefile.split(stem, names, self._length, most)
        for name, part in parts:
            yield safefile.shell(name, [(n, *self.tensors[n]) for n in part])
        if len(parts) > 1:
            index = {tensor: name for name, part in parts for tensor in part}
            total = sum(map(self._length, self.tensors))
            yield _text(INDEX, {"metadata": {"total_size": total}, "weight_map": index})
        yield _text(self._config_name, self._config_as_saved())

    def _length(self, name: str) -> int:
        dtype, shape = self.tensors[name]
        return prod(shape) * SIZES[dtype]

    def _config_as_saved(self) -> dict[str, Any]:
        """The configuration to write; with `--dtype` it states the type of the written weights."""
        dtype = self.options.module_dtype
        if dtype is None or self.adapter:
            return self.config
        key = "torch_dtype" if "torch_dtype" in self.config else "dtype"
        return {**self.config, key: TORCH_NAMES[dtype]}


def _text(name: str, value: Any) -> Shell:
    return Shell.of(name, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
