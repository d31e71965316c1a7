"""Names for an optimizer that knows its parameters by number: given, refused, or said to be so."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zckpt
from zckpt import errors

from ...conftest import Result, texts
from ..equality import load, same_bits

LAYERS = 12  # `10` is sorted before `2`
Program = Callable[..., Result]


class Attention(nn.Module):
    """Weights in the module's order q, k, v, o, which sorted is k, o, q, v."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(4, 4, bias=False))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for name in ("q", "k", "v", "o"):
            hidden = torch.tanh(getattr(self, name)(hidden))
        return hidden


def trained(layers: int = LAYERS) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.ModuleDict({"layers": nn.ModuleList(Attention() for _ in range(layers))})
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        hidden = torch.randn(5, 4)
        for layer in model["layers"]:  # type: ignore[union-attr]
            hidden = layer(hidden)
        hidden.square().sum().backward()
        optimizer.step()
    return model, optimizer


def save(folder: Path, pair: tuple[nn.Module, torch.optim.Optimizer], weights: str) -> Path:
    folder.mkdir()
    if weights.endswith(".safetensors"):
        save_file(pair[0].state_dict(), folder / weights)
    else:
        torch.save(pair[0].state_dict(), folder / weights)
    torch.save(pair[1].state_dict(), folder / "optimizer.pt")
    return folder


def assert_moments_are_right(
    universal: Path, pair: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    tensors = load(universal)
    for name, parameter in pair[0].named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            assert same_bits(tensors[f"{name}/{key}"], pair[1].state[parameter][key]), name


def lines_of(error: str, which: int) -> str:
    """The two lines of Python that an error prints: for a module, and inside a Trainer."""
    lines = [line.strip() for line in error.splitlines()]
    code = [line for line in lines if line.startswith(("names = ", "open("))]
    assert len(code) == 4
    return "\n".join(code[2 * which : 2 * which + 2])


def test_sorted_names_give_no_name_to_a_number(tmp_path: Path, zckpt: Program) -> None:
    """safetensors sorts `layers.10` before `layers.2`, and k, o before q, v."""
    pair = trained()
    source = save(tmp_path / "run", pair, "model.safetensors")
    refused = zckpt("convert", source, tmp_path / "u")
    assert refused.code == 1
    assert "48 parameters by number" in refused.err
    assert not (tmp_path / "u").exists()
    names = tmp_path / "names.txt"
    code = lines_of(refused.err, 0).replace("names.txt", str(names))
    exec(code, {"model": pair[0], "optimizer": pair[1]})
    done = zckpt("convert", source, tmp_path / "u", "--param-names", names)
    assert done.code == 0
    assert_moments_are_right(tmp_path / "u", pair)


def test_names_of_a_module_that_its_file_calls_otherwise(tmp_path: Path, zckpt: Program) -> None:
    """transformers 5 saves some models under older names; --param-names has the module's."""
    pair = trained(3)
    source = save(tmp_path / "run", pair, "model.safetensors")
    saved = {n.replace("layers.", "blocks."): t for n, t in pair[0].state_dict().items()}
    save_file(saved, source / "model.safetensors")
    names = tmp_path / "names.txt"
    names.write_text("\n".join(name for name, _ in pair[0].named_parameters()))
    refused = zckpt("convert", source, tmp_path / "u", "--param-names", names)
    assert refused.code == 1
    assert "--rename" in refused.err
    rule = ("--rename", r"^blocks\.=layers.")
    done = zckpt("convert", source, tmp_path / "u", "--param-names", names, *rule)
    assert done.code == 0, done.err
    assert_moments_are_right(tmp_path / "u", pair)


@pytest.mark.engines
@pytest.mark.first
def test_the_lines_for_a_trainer_write_its_names(tmp_path: Path, zckpt: Program) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=22, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = transformers.Trainer(model, arguments)
    run = save(tmp_path / "run", trained(), "model.safetensors")
    refused = zckpt("convert", run, tmp_path / "out")
    names = tmp_path / "names.txt"
    exec(lines_of(refused.err, 1).replace("names.txt", str(names)), {"trainer": trainer})
    listed = names.read_text().splitlines()
    assert sorted(listed) == sorted(name for name, _ in model.named_parameters())
    norms = [place for place, name in enumerate(listed) if "norm" in name]
    assert norms == list(range(len(listed) - len(norms), len(listed)))  # the second group


def test_a_sorted_dictionary_shows_no_order_whoever_saved_it(tmp_path: Path) -> None:
    pair = trained()
    source = save(tmp_path / "run", pair, "model.safetensors")
    torch.save(load_file(source / "model.safetensors"), source / "model.pt")
    (source / "model.safetensors").unlink()
    with pytest.raises(errors.MissingData, match="does not show the module's order"):
        zckpt.read(source)


def test_names_from_the_modules_order_are_said_to_be_inferred(
    tmp_path: Path, zckpt: Program
) -> None:
    pair = trained()
    source = save(tmp_path / "run", pair, "model.pt")
    looked_at = zckpt("inspect", source, "--json").document
    assert len(looked_at["inferred"]) == 4 * LAYERS
    assert any("inferred from the order" in line for line in texts(looked_at["problems"]))
    assert zckpt("convert", source, tmp_path / "u").code == 0
    assert_moments_are_right(tmp_path / "u", pair)


@pytest.mark.parametrize("to", ["universal", "dcp", "gathered", "deepspeed", "deepspeed-universal"])
def test_verify_does_not_call_two_sides_equal_that_rest_on_one_inference(
    to: str, tmp_path: Path, zckpt: Program
) -> None:
    """Whatever stands between, the target says that its names were inferred."""
    source = save(tmp_path / "run", trained(2), "model.pt")
    options = ["--stage", "2", "--dp", "2"] if to.startswith("deepspeed") else []
    assert zckpt("convert", source, tmp_path / "u").code == 0
    assert zckpt("convert", tmp_path / "u", tmp_path / "t", "--to", to, *options).code == 0
    verified = zckpt("verify", source, "--against", tmp_path / "t")
    assert verified.code == 3
    assert "inferred in both" in verified.out
    assert " equals " not in verified.out
    document = zckpt("verify", source, "--against", tmp_path / "t", "--json").document
    assert document["equal"] is False
    assert document["differences"] == document["problems"] == []
    assert len(document["unproven"][0]["parameters"]) == 8
    assert len(document["inferred"]["a"]) == len(document["inferred"]["b"]) == 8


def test_names_that_are_given_prove_what_was_inferred(tmp_path: Path, zckpt: Program) -> None:
    pair = trained(2)
    source = save(tmp_path / "run", pair, "model.pt")
    zckpt("convert", source, tmp_path / "u")
    names = tmp_path / "names.txt"
    names.write_text("\n".join(name for name, _ in pair[0].named_parameters()))
    verified = zckpt("verify", source, "--against", tmp_path / "u", "--param-names", names)
    assert verified.code == 0
    assert verified.err.endswith(
        "--param-names gave their names [names-inferred]\n"
    )  # and nothing is inferred
    assert verified.err.count("Warning") == 1
    assert " equals " in verified.out
    weights = zckpt("verify", source, "--against", tmp_path / "u", "--tensors", "*/param")
    assert weights.code == 0  # the model's own file says what these are called


def test_shapes_that_differ_tell_in_any_order(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 2))
    optimizer = torch.optim.Adam(reversed(list(model.parameters())))
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    zckpt.convert(save(tmp_path / "run", (model, optimizer), "model.safetensors"), tmp_path / "u")
    assert_moments_are_right(tmp_path / "u", (model, optimizer))
    assert zckpt.read(tmp_path / "u").notices.inferred == ()


def test_rows_and_columns_of_adafactor_are_not_taken_for_a_shape(tmp_path: Path) -> None:
    """Its states of a matrix have the shape of the frozen bias."""
    torch.manual_seed(1)
    model = nn.Linear(3, 5)
    state = {0: {"step": torch.tensor(1.0), "row": torch.ones(5), "column": torch.ones(3)}}
    groups = [{"lr": 0.1, "params": [0]}]
    folder = save(tmp_path / "run", (model, torch.optim.SGD(model.parameters())), "model.pt")
    torch.save({"state": state, "param_groups": groups}, folder / "optimizer.pt")
    with pytest.raises(errors.MissingData, match="by number"):
        zckpt.read(folder)


def test_the_hint_is_of_several_lines(tmp_path: Path, zckpt: Program) -> None:
    source = save(tmp_path / "run", trained(), "model.safetensors")
    text = zckpt("convert", source, tmp_path / "out").err
    assert re.search(r"^Hint: name the optimizer's parameters", text, re.MULTILINE)
    assert "\\n    names" not in text
    document = zckpt("convert", source, tmp_path / "out", "--json").document
    assert document["error"] == "MissingData"
    assert document["hint"].count("names.txt") >= 3


@pytest.mark.parametrize("names", [None, ["real", "mixing"]])
@pytest.mark.parametrize("to", ["gathered", "dcp"])
def test_complex_weights(names: list[str] | None, to: str, tmp_path: Path) -> None:
    """Fourier layers have some. A frozen weight of the same shape gets none of their moments."""
    model = nn.Module()
    model.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
    model.real = nn.Parameter(torch.randn(4))
    model.mixing = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    model.register_buffer("frequencies", torch.randn(2, dtype=torch.complex64))
    optimizer = torch.optim.Adam([model.real, model.mixing])
    (model.real.sum() + model.mixing.abs().sum()).backward()
    optimizer.step()
    source = tmp_path / "last.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)
    manifest = zckpt.read(source, param_names=names)
    assert [name for name, each in manifest.parameters.items() if each.trainable] == [
        "real",
        "mixing",
    ]
    assert manifest.buffers == ("frequencies",)
    zckpt.convert(source, tmp_path / "out", to=to, param_names=names)
    moments = zckpt.load(tmp_path / "out", "mixing/exp_avg")
    assert torch.equal(
        torch.view_as_real(moments), torch.view_as_real(optimizer.state[model.mixing]["exp_avg"])
    )


# -- names that nothing shows


def two_groups(folder: Path, named: bool = False) -> tuple[Path, list[str]]:
    """A file of Lightning's form, and the names: shapes repeat, and two groups share the layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    weights = list(model.parameters())
    groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.01}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    if named:
        for group in state["param_groups"]:
            group["param_names"] = [names[number] for number in group["params"]]
    run = {"pytorch-lightning_version": "2.6.0", "state_dict": model.state_dict()}
    torch.save({**run, "optimizer_states": [state]}, folder / "x.ckpt")
    return folder / "x.ckpt", names


def test_what_needs_no_names_works(tmp_path: Path, zckpt: Program) -> None:
    path, _ = two_groups(tmp_path)
    copy = Path(shutil.copy(path, tmp_path / "y.ckpt"))
    for command in (
        ("inspect", path),
        ("verify", path),
        ("stats", path),
        ("verify", path, "--against", copy),
    ):
        said = zckpt(*command)
        assert said.code == 0, said.err
        assert "optimizer_states.0 is kept as the program's own state: the optimizer lists" in (
            said.err
        )
        assert "--param-names FILE" in said.err
    assert zckpt("diff", path, copy).code == 0
    changed = torch.load(copy)
    changed["optimizer_states"][0]["state"][1]["exp_avg"][0] += 1
    torch.save(changed, copy)
    assert zckpt("verify", path, "--against", copy).code == 3


def test_what_needs_names_asks_for_them(tmp_path: Path, zckpt: Program) -> None:
    path, names = two_groups(tmp_path)
    out, file = tmp_path / "out", tmp_path / "names.txt"
    file.write_text("\n".join(names))
    assert "--param-names names.txt" in zckpt("convert", path, out, "--to", "dcp").err
    assert zckpt("convert", path, out, "--to", "dcp", "--param-names", file).code == 0
    refused = zckpt("verify", path, "--against", out)  # the states of one side have names
    assert refused.code == 1
    assert "--param-names names.txt" in refused.err
    assert zckpt("verify", path, "--against", out, "--param-names", file).code == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda names: names[::-1], r"lists 2.bias of shape \[3\] as number 0, but the optimizer"),
        (lambda names: names[:4], "lists 4 parameters, but the optimizer has 6"),
    ],
    ids=["another order", "too few"],
)
def test_wrong_names_are_not_asked_for_again(
    change: Callable[[list[str]], list[str]], message: str, tmp_path: Path
) -> None:
    path, names = two_groups(tmp_path)
    with pytest.raises(errors.WrongOption, match=f"--param-names {message}") as raised:
        zckpt.convert(path, tmp_path / "out", to="dcp", param_names=change(names))
    assert "in its order, group after group" in raised.value.hint


@pytest.mark.parametrize("kept", [torch.tensor(0.5), torch.ones(4, 1)])
def test_states_that_show_no_shape(kept: torch.Tensor, tmp_path: Path, zckpt: Program) -> None:
    path, names = two_groups(tmp_path)
    run = torch.load(path)
    state = run["optimizer_states"][0]["state"]
    state |= {key: {"step": torch.tensor(1.0), "exp_avg_sq": kept} for key in state}
    torch.save(run, path)
    out, file = tmp_path / "out", tmp_path / "names.txt"
    file.write_text("\n".join(names))
    assert zckpt("verify", path).code == 0
    refused = zckpt("convert", path, out, "--to", "dcp")
    assert re.search(r"states have the shape .*names\.txt", refused.err, re.DOTALL)
    for command in (("inspect", path), ("convert", path, out, "--to", "dcp")):
        assert zckpt(*command, "--param-names", file).code == 0
    assert zckpt("verify", path, "--against", out, "--param-names", file).code == 0
    back = ("convert", path, tmp_path / "back", "--to", "gathered", "--param-names", file)
    assert zckpt(*back).code == 0
    optim = torch.load(tmp_path / "back" / path.name)["optimizer_states"][0]
    assert all(torch.equal(own["exp_avg_sq"], kept) for own in optim["state"].values())


def test_names_that_a_file_has_itself(tmp_path: Path) -> None:
    path, names = two_groups(tmp_path, named=True)
    line = f"{path} names its parameters itself, in another order than --param-names has"
    assert line in texts(zckpt.read(path, param_names=names[::-1]).notices.warnings)
    assert line not in texts(zckpt.read(path, param_names=names).notices.warnings)
    assert line not in texts(zckpt.read(path).notices.warnings)
