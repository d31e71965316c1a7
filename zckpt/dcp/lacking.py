"""Finds the keys of a state dict that a checkpoint cannot fill, and reports them in one error."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property

from msgspec import Struct, field

from ..core.grouping import by_key
from ..errors import MissingData, listed
from ..formats.dcp.items import StoredTensor
from .keys import NUMBERED, KeyMeaning
from .source import Meaning, Source

MOST = 4  # reasons in one message
MISSING = "Missing key in checkpoint state_dict: "
"""The beginning of torch's own error, for programs that look for it."""
PARTIAL = (
    "To leave such keys as they are, load with planner=DefaultLoadPlanner(allow_partial_load=True)"
)


class Lookup(Struct, eq=False, dict=True):
    """What the keys to load mean, and which of them cannot be filled.

    missing     keys that the checkpoint does not have
    not_loaded  keys that zckpt cannot restore, each with an error that tells the reason

    Both grow while keys are looked up.
    """

    source: Source
    meanings: Mapping[str, Meaning | None]
    not_loaded: dict[str, Exception] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.missing = {key: None for key, meaning in self.meanings.items() if meaning is None}
        self._match_rules()

    @cached_property
    def by_name(self) -> dict[str, KeyMeaning]:
        return {key: each for key, each in self.meanings.items() if isinstance(each, KeyMeaning)}

    def _match_rules(self) -> None:
        """Requires one change of prefix for all weights' names, and one for all states' names.

        Otherwise raises MissingData. But if the program also loads keys exactly as stored, all keys
        with another prefix than the source's are added to `missing` instead.
        """
        names = self.source.names if self.by_name else None
        if names is None:
            return
        # by a second rule, another copy of the weights (an average) would get the model's values
        for kind, rule_of_source in names.rules.items():
            rules = by_key(
                ((meaning.front, meaning.rule), key)
                for key, meaning in self.by_name.items()
                if meaning.kind == kind
            )
            if self._asks_for_stored(rule_of_source[0] or names.model):
                rules.pop(rule_of_source, None)
                self.missing.update((key, None) for keys in rules.values() for key in keys)
            elif len(rules) > 1:
                raise MissingData(
                    "program-does-not-fit",
                    f"the keys {listed([keys[0] for keys in rules.values()])} match the source's "
                    "names only with different prefixes removed or added: load the state dicts of "
                    "these keys in separate calls, or pass rename=[(REGEX, REPL)] to StorageReader",
                )

    def _asks_for_stored(self, front: str) -> bool:
        """Whether the program asks for stored keys that begin with `front`.

        Only a DCP directory has stored keys.
        """
        return self.source.stored is not None and any(
            key.startswith(front)
            for key, meaning in self.meanings.items()
            if isinstance(meaning, StoredTensor)
        )

    def report(self, is_partial: bool) -> None:
        """Raises MissingData if keys cannot be filled.

        A partial load only warns about keys that exist but cannot be loaded.
        """
        path = self.source.path
        reasons = [f"zckpt does not load {key}: {why}" for key, why in self.not_loaded.items()]
        if is_partial:
            for reason in reasons:
                warnings.warn(f"{path}: {reason}. It stays unchanged", stacklevel=2)
            return
        sentences = self._missing(list(self.missing)) if self.missing else []
        if reasons:
            sentences += reasons[:MOST]
            if len(reasons) > MOST:
                sentences.append(f"The same applies to {listed(list(self.not_loaded)[MOST:])}")
            if self.source.stored is not None:
                sentences.append(
                    "torch.distributed.checkpoint.FileSystemReader loads these keys, but runs the "
                    "checkpoint's pickles: use it only if you trust the checkpoint"
                )
        if sentences:
            raise MissingData("program-does-not-fit", f"{MISSING}{'. '.join(sentences)}. {PARTIAL}")

    def _missing(self, keys: Sequence[str]) -> list[str]:
        """Sentences that name the missing keys, and keys of the checkpoint that stay unused."""
        source = self.source
        numbered = [key for key in keys if NUMBERED.search(key)]
        if numbered and not source.numbers and not any(map(NUMBERED.search, source.listing.items)):
            return [
                f"the checkpoint has no {listed(numbered, 3)}: it lists parameters by name, the "
                "state dict by number",
                "Give StorageReader(..., model=model, optimizer=optimizer), or use "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict",
            ]
        text = f"the checkpoint has no {listed(sorted(keys))}"
        if source.stored is not None:
            unused = [key for key in source.listing.items if key not in self.meanings]
        else:
            unused = source.names.unused(self.by_name.values()) if source.names else []
        if unused:
            text += f"; unused keys of the checkpoint: {listed(unused)}"
        sentences = [text]
        if source.why_nameless:
            sentences.append(f"Keys were not looked up by name: {source.why_nameless}")
        else:
            sentences.append(
                "If the checkpoint has the missing keys under other names, pass "
                "rename=[(REGEX, REPL)] to StorageReader"
            )
        return sentences
