"""Names across engines: a rule for prefixes, `--rename` for the rest, and no guesses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import zckpt
from zckpt.core.checkpoint.manifest import Manifest
from zckpt.errors import MissingData, WrongOption
from zckpt.naming import names as naming
from zckpt.naming.names import canonical, matched, renamed

from ..conftest import EXAMPLE, Result, needs

NAMES = ["trunk.0.weight", "head.weight", "mean"]


def under(prefix: str) -> list[str]:
    return [prefix + name for name in NAMES]


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return zckpt.read(EXAMPLE)


@pytest.mark.parametrize("source", ["", "module.", "_forward_module.", "model.", "module.model."])
@pytest.mark.parametrize("wanted", ["", "module.", "_forward_module.", "model.", "_orig_mod."])
def test_prefixes_are_matched_by_rule(wanted: str, source: str) -> None:
    names = matched(under(wanted), under(source))
    assert names == dict(zip(under(wanted), under(source), strict=True))


def test_exact_names_come_first() -> None:
    # "model.mean" and "mean" both exist: another rule would fit too, but equal names win
    source = under("model.") + NAMES
    assert matched(NAMES, source) == {name: name for name in NAMES}
    assert matched(under("model."), source) == {name: name for name in under("model.")}


def test_wrappers_inside_are_taken_out() -> None:
    wanted = ["trunk._orig_mod.0._checkpoint_wrapped_module.weight", "_orig_mod.head.weight"]
    source = ["_fsdp_wrapped_module.trunk.0.weight", "head._fsdp_wrapped_module.weight"]
    assert matched(wanted, source) == dict(zip(wanted, source, strict=True))


def test_hugging_face_names_keep_their_model() -> None:
    """Only some names begin with it, so it is not a wrapper."""
    names = ["model.layers.0.weight", "lm_head.weight"]
    assert list(matched(names, [f"module.{name}" for name in names]).values()) == [
        "module.model.layers.0.weight",
        "module.lm_head.weight",
    ]


def test_one_rule_holds_for_all_names() -> None:
    with pytest.raises(MissingData, match=r"names: b; unused names of the source: module\.b"):
        matched(["a", "b"], ["a", "module.b"])


def test_what_is_left_over_is_listed_of_both_sides() -> None:
    with pytest.raises(
        MissingData, match=r"model\.tail\.weight; unused names of the source: mean"
    ) as caught:
        matched([*under("model.")[:2], "model.tail.weight"], NAMES)
    assert "--rename" in caught.value.hint


def test_two_wanted_names_never_get_one() -> None:
    with pytest.raises(MissingData, match="several names become one"):
        matched(["_orig_mod.mean", "mean"], ["module.mean"])


def test_names_that_differ_in_wrappers_alone_are_an_error() -> None:
    with pytest.raises(WrongOption, match=r"_orig_mod\.mean"):
        matched(["module.mean"], ["mean", "_orig_mod.mean"])


def test_renamed_is_renamed_everywhere(manifest: Manifest) -> None:
    changed = renamed(manifest, [(r"^fc(\d)\.", r"layers.\1."), ("^head", "top"), ("^", "net.")])
    assert [*changed.parameters][:2] == ["net.embedding.weight", "net.layers.1.weight"]
    assert changed.parameters["net.embedding.weight"].aliases == ("net.top.weight",)
    assert changed.buffers == ("net.running_mean",)
    assert all(entry.key == key for key, entry in changed.entries.items())
    assert len(changed.entries) == len(manifest.entries)
    assert ("net.layers.1.weight", "exp_avg") in changed.entries
    assert {entry.parameter for entry in changed.replicas} <= {
        *changed.parameters,
        *changed.buffers,
    }
    assert set(changed.state["module"]) == set(naming.names_of(changed))
    modules = [
        "",
        *(f"net.{name}" for name in ["embedding", "frozen", "layers.1", "layers.2", "top"]),
    ]
    assert list(changed.state["module_metadata"]) == modules


def test_extra_states_are_renamed(manifest: Manifest) -> None:
    kept = {**manifest.state, "module_extra": {"fc1._extra_state": b"x"}}
    state = renamed(replace(manifest, state=kept), [("fc1", "first")]).state
    assert state["module_extra"] == {"first._extra_state": b"x"}


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([("fc3", "x")], "matches no name"),
        ([("^fc", "gone."), ("^fc", "x")], "matches no name"),
        ([(r"^fc\d", "layer")], "would become one name"),
        ([("^fc1$", "("), ("(", "x")], "not a regular expression"),
        ([("fc1", r"\9")], "not a valid replacement"),
        ([("^running_mean$", "")], "would become empty"),
    ],
)
def test_bad_rules_are_refused(manifest: Manifest, rules: Any, said: str) -> None:
    with pytest.raises(WrongOption, match=said) as ended:
        renamed(manifest, rules)
    if said.startswith("would become"):
        assert "REPL of --rename, so that" in ended.value.hint


def test_canonical_drops_what_every_name_begins_with(manifest: Manifest) -> None:
    wrapped = renamed(manifest, [("^", "_forward_module.module._orig_mod.")])
    assert canonical(wrapped) == manifest
    assert canonical(manifest) is manifest
    hugging = renamed(manifest, [("^", "model.")])
    assert canonical(hugging) is hugging
    some = renamed(manifest, [("^fc", "module.fc")])
    assert canonical(some) is some


def test_commands_rename(tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    rule, back = r"^fc(\d)=layers.\1", r"^layers\.(\d)=fc\1"
    assert zckpt("convert", EXAMPLE, tmp_path / "out", "--rename", rule).code == 0
    assert zckpt("verify", EXAMPLE, "--against", tmp_path / "out").code == 3
    assert zckpt("verify", EXAMPLE, "--against", tmp_path / "out", "--rename", rule).code == 0
    assert zckpt("diff", tmp_path / "out", EXAMPLE, "--rename", back).code == 0
    assert zckpt("reshard", tmp_path / "out", tmp_path / "back", "--rename", back).code == 0
    assert zckpt("diff", EXAMPLE, tmp_path / "back").code == 0


@pytest.mark.parametrize("word", ["fc1", "(=x"])
def test_a_rule_that_is_none_is_wrong_usage(zckpt: Callable[..., Result], word: str) -> None:
    assert zckpt("diff", EXAMPLE, EXAMPLE, "--rename", word).code == 2


def test_renaming_does_not_go_with_gathering(zckpt: Callable[..., Result]) -> None:
    ended = zckpt("verify", EXAMPLE, "--against", EXAMPLE, "--gather", "--rename", "^=model.")
    assert (ended.code, "--gather" in ended.err) == (2, True)


def test_prefixes_are_matched_where_no_name_is_shared(
    tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    zckpt("convert", EXAMPLE, tmp_path / "out", "--rename", "^=module.")
    assert zckpt("verify", EXAMPLE, "--against", tmp_path / "out").code == 0
    assert zckpt("diff", tmp_path / "out", EXAMPLE).code == 0


def test_param_names_may_have_other_prefixes(tmp_path: Path) -> None:
    names = tuple(f"model.{name}" for name in zckpt.read(EXAMPLE).parameters)
    zckpt.convert(EXAMPLE, tmp_path / "out", param_names=names)
    assert tuple(zckpt.read(tmp_path / "out").parameters) == names
    assert zckpt.read(tmp_path / "out").buffers == ("model.running_mean",)


def test_another_engine_gets_names_without_wrappers(tmp_path: Path) -> None:
    needs("h5py")
    zckpt.convert(EXAMPLE, tmp_path / "wrapped", rename=(("^", "module."),))
    zckpt.convert(tmp_path / "wrapped", tmp_path / "ort", to="onnxruntime")
    assert "fc1.weight" in zckpt.read(tmp_path / "ort").parameters
    zckpt.reshard(tmp_path / "wrapped", tmp_path / "same")
    assert "module.fc1.weight" in zckpt.read(tmp_path / "same").parameters
