"""Decides whether the target may lack a state of the source's optimizer.

A state that the target cannot store ends the run before the first byte of a tensor, unless the user
types `--drop-state`, or the optimizer recomputes it. The target's writer does not report which
states it stores: the target's reader finds them in the files that the writer has laid out.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from shlex import quote
from typing import Any

from msgspec import Struct

from .. import formats
from ..core.checkpoint import covering, states
from ..core.checkpoint.facts import StepPlace
from ..core.checkpoint.keys import has_texts_alone, in_doubt
from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.states import FACTORING, State
from ..core.grouping import by_key
from ..core.passes.description import Report, said
from ..core.passes.layout import Layout, Shell
from ..errors import Notice, UnsupportedState, WrongOption, joined, listed, note, warning
from ..formats.format import Format
from ..training import objects
from ..training.optimizers import MOMENTS, is_of_axis, needed_states
from ..training.options import DROP_STATE, OPTIMIZER, WEIGHTS_ONLY, Options


def dropped_states(manifest: Manifest, options: Options) -> list[Report]:
    """Report lines about the optimizer states that --drop-state or --weights-only drops.

    Raises WrongOption if --drop-state names a state that the checkpoint does not have.
    """
    keys = options[DROP_STATE]
    if keys and options.weights_only:
        raise WrongOption(
            "options-conflict",
            "--drop-state does not apply with --weights-only",
            hint="leave out --drop-state: --weights-only writes no optimizer state",
        )
    states.require_known(keys, [manifest])
    if not (keys or options.weights_only):
        return []
    option = WEIGHTS_ONLY if options.weights_only else DROP_STATE
    known_states = states.states_of(manifest)
    return [_line(known_states[key], option.flag) for key in dict.fromkeys(keys or known_states)]


def unable_to_step(manifest: Manifest, options: Options) -> list[Notice]:
    """Warns if the optimizer will fail at its first update, because it needs a dropped state.

    `manifest` has no dropped states any more. A parameter without any state causes no failure: the
    optimizer makes new states for it. The result is a list of at most one warning.
    """
    if options.weights_only:
        return []
    place = manifest.run.step_place
    steps = (item.step for own in manifest.rank_manifests for item in own.parameters.values())
    has_step = any(step is not None for step in steps) and (place is None or place.where == "state")
    if not (has_step or states.states_of(manifest)):
        return []
    names = (options[OPTIMIZER] or manifest.optimizer or "").split(", ")
    lost = {name: needed_states(name).intersection(options[DROP_STATE]) for name in names}
    return [
        warning(
            "state-dropped",
            f"{name} cannot take a step without {joined(sorted(keys))}: load the target into an "
            "optimizer that does not need this state, or add --weights-only",
            subject=min(keys),
        )
        for name, keys in lost.items()
        if keys
    ]


def _numbers(manifest: Manifest) -> dict[str, Any]:
    """Maps keys to the optimizer's numbers that belong to no parameter.

    A number `n` inside the optimizer's dictionary `state` has the key `state.n`. A number beside
    this dictionary has its own key.
    """
    numbers: dict[str, Any] = {}
    for rank in manifest.rank_manifests:
        numbers |= rank.states.numbers("beside")
        among = rank.states.numbers("among").items()
        numbers |= {f"state.{key}": value for key, value in among}
    return numbers


def _line(state: State, reason: str) -> Report:
    return {"state": state.key, "parameters": state.count, "reason": reason}


class Keeping(Struct, frozen=True):
    """Checks that a target can store all optimizer states that the user does not drop.

    source      what was read, without dropped states
    named       `source` under the target's names
    grouped     `named` without the states of parameters that the next run does not train
    admitted    `grouped` without pickled objects that need --allow-object
    report      gets the findings
    """

    source: Manifest
    named: Manifest
    grouped: Manifest
    admitted: Manifest
    format: Format
    options: Options
    report: Report

    def read_back(self, layout: Layout) -> Callable[[str], Manifest]:
        """Returns a function that reads a target's files, and checks which states they can store.

        The files need no tensor data. The function raises UnsupportedState for a state that the
        files cannot store, and UnsupportedCheckpoint if the source has no values for some elements.
        """
        reader_of_shells = layout.read_back or self.format.read_shells

        def read_and_check(folder: str) -> Manifest:
            shells = reader_of_shells(folder)
            covering.refuse_holes(shells, self.format.name)
            if shells.groups is not None:
                self._keep_groups()
            self.report["computed_afresh"] = self._computed_afresh(shells)
            self.report["left_out"] += said(self._beside(shells))
            of_counts = _of_counts(self.source.run.step_place, shells.run.step_place)
            self.report["warnings"] += said((*of_counts, *self._of_texts(shells)))
            return shells

        return read_and_check

    def try_out(self, layout: Layout) -> None:
        """Creates the target's files in a temporary folder and checks them; used by dry runs."""
        asks = self.has_states or _numbers(self.source) or any(self._unsupported_in_groups)
        if asks and layout.read_back is not None:
            with _laid_out(layout.shells()) as folder:
                layout.read_back(folder)

    @property
    def is_known(self) -> bool:
        """Whether the target can certainly store all states, so that trying it out is unnecessary.

        Every format can store the moments of Adam. A format that states no limit (its text `states`
        is empty) can also store every number.
        """
        if self.options.weights_only or not self.format.is_resumed:
            return self.options.weights_only
        if _numbers(self.source) or any(self._unsupported_in_groups):
            return False
        if self.named is not self.source and states.missing_in(self.source, self.named):
            return False
        groups = (group for own in self.source.rank_manifests for group in own.groups or ())
        if any(FACTORING & group.keys() for group in groups):
            return False
        every = states.states_of(self.source)
        forms = ("slot",) if self.format.states else ("slot", "number", "none")
        if self.format.states and not self.format.keeps_shapes and not every.keys() <= {*MOMENTS}:
            return False
        return all(s.form in forms and not is_of_axis(key, ()) for key, s in every.items())

    @property
    def has_states(self) -> bool:
        return not self.options.weights_only and bool(states.states_of(self.source))

    @property
    def _unsupported_in_groups(self) -> list[dict[str, Any]]:
        """Lists, for each param group, the hyper-parameters that are objects and not allowed.

        The user allows objects of a class with `--allow-object`.
        """
        if self.options.weights_only:
            return []
        lost = []
        for named, admitted in zip(
            self.grouped.rank_manifests, self.admitted.rank_manifests, strict=True
        ):
            before, after = named.groups or (), admitted.groups or ()
            places = {name: item.group for name, item in admitted.parameters.items()}
            pairs = {  # the target may lack an empty group, or have one more
                (parameter.group, places.get(name)) for name, parameter in named.parameters.items()
            }
            lost += [
                {key: value for key, value in before[a].items() if key not in after[b]}
                for a, b in pairs
                if before and after and a is not None and b is not None
            ]
        return lost

    def _keep_groups(self) -> None:
        """Raises UnsupportedState for a hyper-parameter that is an object and not allowed.

        The user allows objects of a class with `--allow-object`.
        """
        values = self._unsupported_in_groups
        if not (keys := dict.fromkeys(str(key) for own in values for key in own)):
            return
        hint = "add --weights-only"
        if classes := objects.admissible(values, formats.engine_objects()):
            allow = " ".join(f"--allow-object {name}" for name in classes)
            hint = f"to write it, if you trust its class: {allow}; or {hint}"
        raise UnsupportedState(
            "state-unsupported",
            f"the target cannot store {listed(list(keys))} of the optimizer's groups ({OBJECTS})",
            hint=hint,
        )

    def _computed_afresh(self, shells: Manifest) -> list[Report]:
        """Report lines about states that the target lacks and the optimizer will recompute.

        Raises UnsupportedState for any other state that the target lacks.
        """
        if not self.has_states:
            return []
        renamed = () if self.named is self.source else states.missing_in(self.source, self.named)
        unfit = states.of_vectors(self.source, shells) + states.of_numbers(self.source, shells)
        lost = {
            state.key: state
            for state in (*unfit, *states.missing_in(self.grouped, shells), *renamed)
        }
        reasons = {key: states.harmless(state, self.source) for key, state in lost.items()}
        if needed := [state for key, state in lost.items() if not reasons[key]]:
            self._refuse(needed)
        return [_line(state, reasons[key]) for key, state in lost.items()]

    def _beside(self, shells: Manifest) -> list[Notice]:
        """Reports numbers of the optimizer that belong to no parameter and get lost."""
        lost = _numbers(self.source).keys() - _numbers(shells).keys()
        if not lost or self.options.weights_only or not self.format.is_resumed:
            return []
        message = f"{listed(sorted(lost))}: numbers of the optimizer that belong to no parameter"
        return [note("state-omitted", message, subject=min(lost))]

    def _of_texts(self, shells: Manifest) -> list[Notice]:
        """Warns about keys in param groups, schedulers and client state that look like numbers.

        They may have been numbers before torch.distributed.checkpoint turned all keys into strings.
        """
        if has_texts_alone(shells) or not has_texts_alone(self.source):
            return []
        parts: dict[str, Any] = {"groups": list(shells.groups or ())}
        parts |= {key: shells.state.get(key) for key in ("lr_scheduler", "client_state")}
        paths = [path for key, part in parts.items() for path in in_doubt(part, key)]
        if not paths:
            return []
        return [
            warning(
                "program-must-set",
                f"the keys of {listed(paths, 4)} may have been numbers: "
                "torch.distributed.checkpoint turns all keys into strings. Turn them back into "
                "numbers before the program loads them: MultiStepLR, for example, does not find "
                'its milestones under strings such as "30"',
                subject=paths[0],
            )
        ]

    def _refuse(self, lost: Sequence[State]) -> None:
        filtered = states.missing_in(self.grouped, self.admitted)
        of_objects = {state.key for state in filtered if state.form != "unsupported"}
        reasons = by_key(
            (OBJECTS if state.key in of_objects else state.reason or self.format.states, state)
            for state in lost
        )
        sentences = [
            states.in_words(states_of_reason) + (f" ({reason})" if reason else "")
            for reason, states_of_reason in reasons.items()
        ]
        keys = [state.key for state in lost]
        drop = " ".join(f"{DROP_STATE.flag} {quote(key)}" for key in keys)
        without = "it" if len(keys) == 1 else "them"
        hint = f"to go on without {without}: {drop} (or --weights-only)"
        if classes := self._classes(of_objects.intersection(keys)):
            allow = " ".join(f"--allow-object {name}" for name in classes)
            hint += f"; to write the objects, if you trust their classes: {allow}"
        if states.OF_VECTORS in reasons:
            hint = "to begin with fresh states: --weights-only"
        raise UnsupportedState(
            "state-unsupported",
            f"the target cannot store the optimizer's {'; '.join(sentences)}",
            hint=hint,
        )

    def _classes(self, keys: Iterable[str]) -> list[str]:
        """The classes that the user can allow with `--allow-object` to keep the states `keys`.

        Empty if one of the classes must never be allowed.
        """
        rows = [
            row
            for m in self.grouped.rank_manifests
            for row in m.states.of_form("other", "partition")
        ]
        values = [row.value for row in rows if row.key in keys]
        return objects.admissible(values, formats.engine_objects())


def _of_counts(before: StepPlace | None, after: StepPlace | None) -> list[Notice]:
    """Warns if the target's optimizer counts its step in other units than the source's."""
    if before is None or after is None or before.times == after.times:
        return []
    return [
        warning(
            "not-exact",
            "the optimizer stores its step in the groups. Each update adds "
            f"{after.times} to it in the target's engine, but {before.times} in the source's, so "
            "updates and losses will differ",
        )
    ]


OBJECTS = "objects whose classes would run when a program loads the target"


@contextmanager
def _laid_out(shells: Iterable[Shell]) -> Iterator[str]:
    """Yields a temporary folder with the target's files, without tensor data."""
    with tempfile.TemporaryDirectory(prefix="zckpt-") as folder:
        for shell in shells:
            path = os.path.join(folder, shell.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "xb") as file:
                for offset, data in shell.parts:
                    file.seek(offset)
                    file.write(data)
                file.truncate(shell.size)
        yield folder
