"""Several models or optimizers in one checkpoint: all are looked at, and `--root` chooses one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import zckpt
import zckpt as package
from zckpt import errors
from zckpt.dcp import StorageReader

from ...conftest import Result, texts
from ..equality import same_bits

Program = Callable[..., Result]
Pair = tuple[nn.Module, torch.optim.Optimizer]


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, width)
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.out(self.norm(self.emb(tokens)))
        return output


def train(pair: Pair, steps: int, seed: int) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * seed + step)
        loss = pair[0](torch.randint(0, 7, (8,))).square().mean()
        pair[1].zero_grad()
        loss.backward()
        pair[1].step()
        losses.append(loss.item())
    return losses


def trained(seed: int, width: int = 5, kind: Any = torch.optim.AdamW) -> Pair:
    torch.manual_seed(seed)
    model = Net(width)
    pair = model, kind(model.parameters(), lr=0.01)
    train(pair, 2 + seed, seed)
    return pair


class Gan:
    """A generator and a discriminator of one architecture: shapes do not tell them apart."""

    def __init__(self) -> None:
        self.models = {"generator": trained(0), "discriminator": trained(1)}

    def state_dicts(self, of_dcp: bool) -> dict[str, Any]:
        whole: dict[str, Any] = {}
        for name, (model, optimizer) in self.models.items():
            key = f"optimizer_{name[0]}"
            if of_dcp:
                whole[name] = get_model_state_dict(model)
                whole[key] = get_optimizer_state_dict(model, optimizer)
            else:
                whole[name], whole[key] = model.state_dict(), optimizer.state_dict()
        return {**whole, "epoch": 3}

    def save(self, folder: Path) -> dict[str, Path]:
        torch.save(self.state_dicts(of_dcp=False), folder / "gan.pt")
        dcp.save(self.state_dicts(of_dcp=True), checkpoint_id=folder / "gan")
        return {"torch.save": folder / "gan.pt", "dcp": folder / "gan"}


@pytest.fixture(scope="module")
def gan() -> Gan:
    return Gan()


@pytest.fixture(scope="module")
def checkpoints(gan: Gan, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return gan.save(tmp_path_factory.mktemp("gan"))


def assert_is_root(path: Path, pair: Pair, prefix: str, **reading: Any) -> None:
    """Weights, buffers and optimizer states are those that the program had."""
    model, optimizer = pair
    for name, value in model.state_dict().items():
        assert same_bits(zckpt.load(path, f"{prefix}{name}/param", **reading), value), name
    for name, parameter in model.named_parameters():
        for slot in ("exp_avg", "exp_avg_sq"):
            state = zckpt.load(path, f"{prefix}{name}/{slot}", **reading)
            assert same_bits(state, optimizer.state[parameter][slot]), (name, slot)


@pytest.mark.parametrize("kind", ["torch.save", "dcp"])
def test_all_are_looked_at(
    kind: str, gan: Gan, checkpoints: dict[str, Path], zckpt: Program
) -> None:
    path = checkpoints[kind]
    shown = zckpt("inspect", path)
    assert shown.code == 0
    assert "generator (optimizer_g), discriminator (optimizer_d)" in shown.out
    report = zckpt("inspect", path, "--json").document
    assert report["roots"] == {"generator": ["optimizer_g"], "discriminator": ["optimizer_d"]}
    assert report["parameters"] == 10
    for name, pair in gan.models.items():
        assert_is_root(path, pair, f"{name}.")
    assert zckpt("verify", path).code == 0
    assert zckpt("stats", path).code == 0


@pytest.mark.parametrize("place", ["generator", "discriminator", "optimizer_g", "optimizer_d"])
def test_a_difference_in_any_of_them_is_seen(
    place: str, gan: Gan, checkpoints: dict[str, Path], tmp_path: Path, zckpt: Program
) -> None:
    state = gan.state_dicts(of_dcp=True)
    tensors = state[place].get("state", {}).get("emb.weight", state[place])
    key = "exp_avg" if "exp_avg" in tensors else "emb.weight"
    tensors[key] = tensors[key] + 1
    torch.save(state, tmp_path / "other.pt")
    verified = zckpt("verify", checkpoints["dcp"], "--against", tmp_path / "other.pt")
    assert verified.code == 3
    root = {"g": "generator", "d": "discriminator"}[place.removeprefix("optimizer_")[0]]
    assert f"{root}.emb.weight/" in verified.out


@pytest.mark.parametrize("kind", ["torch.save", "dcp"])
@pytest.mark.parametrize("root", ["generator", "discriminator"])
def test_the_hint_leads_to_one_that_resumes(
    root: str, kind: str, gan: Gan, checkpoints: dict[str, Path], tmp_path: Path, zckpt: Program
) -> None:
    """torch itself loads the target into the program's keys, and goes on with the same losses."""
    source = checkpoints[kind]
    refused = zckpt("convert", source, tmp_path / "t", "--to", "dcp")
    assert refused.code == 1
    assert "several models: generator, discriminator" in refused.err
    assert "--root generator" in refused.err
    chosen = ("--root", root, "--dp", "2")
    written = zckpt("convert", source, tmp_path / "t", "--to", "dcp", *chosen)
    assert written.code == 0
    assert "because of its name; to choose another" in written.err
    assert f"--root {root}=OPTIMIZER" in written.err
    assert "left out: " in written.out
    resumed = trained(9)
    key = f"optimizer_{root[0]}"
    state = {root: get_model_state_dict(resumed[0]), key: get_optimizer_state_dict(*resumed)}
    dcp.load(state, checkpoint_id=tmp_path / "t")
    set_model_state_dict(resumed[0], state[root])
    set_optimizer_state_dict(*resumed, state[key])
    uninterrupted = Gan().models[root]
    assert train(resumed, 3, seed=5) == train(uninterrupted, 3, seed=5)
    inferred = kind == "torch.save"  # of two weights of one shape, under numbers
    for pair in ((tmp_path / "t", source), (source, tmp_path / "t")):
        verified = zckpt("verify", pair[0], "--against", pair[1], "--root", root)
        assert verified.code == (3 if inferred else 0)
        assert "has the same bytes" in verified.out or not inferred
        assert zckpt("diff", *pair, "--root", root).code == verified.code
    refused = zckpt("verify", tmp_path / "t", "--against", source)
    assert refused.code == 1
    assert f"Hint: choose one with --root {root}\n" in refused.err


@pytest.mark.parametrize("root", ["generator", "discriminator"])
def test_a_proof_of_all_is_one_of_each(
    root: str, checkpoints: dict[str, Path], tmp_path: Path, zckpt: Program
) -> None:
    source, proof, out = checkpoints["dcp"], tmp_path / "proof.json", tmp_path / "out"
    assert zckpt("verify", source, "--save-proof", proof).code == 0
    assert zckpt("convert", source, out, "--root", root).code == 0
    for path in (out, source):
        said = zckpt("verify", path, "--against", proof, "--root", root)
        assert said.code == 0, said.out + said.err
    (other,) = {"generator", "discriminator"} - {root}
    said = zckpt("verify", out, "--against", proof, "--root", other)
    assert said.code == 3
    assert "emb.weight/exp_avg: CRC-32" in said.out
    assert "step 2 against 3" in said.out or "step 3 against 2" in said.out
    refused = zckpt("verify", out, "--against", proof)
    assert "choose one with --root generator or --root discriminator" in refused.err
    unknown = zckpt("verify", out, "--against", proof, "--root", "nix")
    assert "has a model that is called nix" in unknown.err


def test_the_hint_names_those_whose_shapes_fit(tmp_path: Path, zckpt: Program) -> None:
    whole: dict[str, Any] = {}
    for name, pair in (("a", trained(0, 4)), ("b", trained(1)), ("c", trained(2))):
        whole |= {name: pair[0].state_dict(), f"optimizer_{name}": pair[1].state_dict()}
    torch.save(whole, tmp_path / "all.pt")
    torch.save({"model": whole["b"], "optimizer": whole["optimizer_b"]}, tmp_path / "one.pt")
    for pair in (("one.pt", "all.pt"), ("all.pt", "one.pt")):
        said = zckpt("verify", tmp_path / pair[0], "--against", tmp_path / pair[1])
        assert "Hint: choose one with --root b or --root c\n" in said.err


@pytest.mark.parametrize("to", ["universal", "dcp", "gathered", "deepspeed"])
def test_weights_of_all(
    to: str, gan: Gan, checkpoints: dict[str, Path], tmp_path: Path, zckpt: Program
) -> None:
    written = zckpt("convert", checkpoints["dcp"], tmp_path / "t", "--to", to, "--weights-only")
    assert written.code == 0
    slot = "master" if to == "deepspeed" else "param"
    for root, (model, _) in gan.models.items():
        for name, _ in model.named_parameters():
            value = zckpt_load(tmp_path / "t", f"{root}.{name}/{slot}")
            assert same_bits(value, model.state_dict()[name]), name
    if to == "dcp":  # under the program's own keys
        state = {root: get_model_state_dict(trained(9)[0]) for root in gan.models}
        dcp.load(state, checkpoint_id=tmp_path / "t")
        for root, (model, _) in gan.models.items():
            assert all(same_bits(v, state[root][k]) for k, v in model.state_dict().items())


zckpt_load = zckpt.load  # the fixture has the module's name


def test_a_folder_for_from_pretrained_has_one_model(
    checkpoints: dict[str, Path], tmp_path: Path, zckpt: Program
) -> None:
    refused = zckpt("export", checkpoints["dcp"], tmp_path / "t")
    assert refused.code == 1
    assert "several models" in refused.err
    assert "--weights-only" not in refused.err


def test_models_of_several_shapes_under_roots_of_their_own(tmp_path: Path, zckpt: Program) -> None:
    """Shapes show which optimizer trains which model: no name of a key is asked."""
    pairs = {"first": trained(0, 5), "second": trained(1, 6)}
    torch.save(
        {
            key: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            for key, (model, optimizer) in pairs.items()
        },
        tmp_path / "nested.pt",
    )
    torch.save(
        {
            **{key: model.state_dict() for key, (model, _) in pairs.items()},
            "optimizers": [pair[1].state_dict() for pair in reversed(pairs.values())],
        },
        tmp_path / "lists.pt",
    )
    for name, own in (
        ("nested.pt", ["first.optimizer", "second.optimizer"]),
        ("lists.pt", ["optimizers.1", "optimizers.0"]),
    ):
        report = zckpt("inspect", tmp_path / name, "--json").document
        assert report["roots"] == {"first": own[:1], "second": own[1:]}
        for root, pair in pairs.items():
            assert_is_root(tmp_path / name, pair, f"{root}.")
            assert_is_root(tmp_path / name, pair, "", root=root)
            written = zckpt("convert", tmp_path / name, tmp_path / name[0] / root, "--root", root)
            assert written.code == 0
            assert "by its name" not in written.err


def test_an_optimizer_of_an_unknown_model(tmp_path: Path, zckpt: Program) -> None:
    """Nothing is guessed: its tensors are still read, and the user says whose it is."""
    pairs = {"student": trained(0), "critic": trained(1)}
    state: dict[str, Any] = {key: model.state_dict() for key, (model, _) in pairs.items()}
    for key, (_, optimizer) in zip(("first", "second"), pairs.values(), strict=True):
        state[key] = deepcopy(optimizer.state_dict())
    path = tmp_path / "run.pt"
    torch.save(state, path)
    shown = zckpt("inspect", path)
    assert shown.code == 0
    assert (
        "first is kept as the program's own state, not as optimizer state: nothing shows which "
        "model" in shown.err
    )
    assert zckpt("verify", path).code == 0
    state["second"]["state"][0]["exp_avg"][0] += 1
    torch.save(state, tmp_path / "other.pt")
    assert zckpt("verify", path, "--against", tmp_path / "other.pt").code == 3
    refused = zckpt("convert", path, tmp_path / "t", "--root", "student")
    assert refused.code == 1
    assert "--root student=first" in refused.err
    assert "--weights-only" in refused.err
    for root, key in (("student", "first"), ("critic", "second")):
        choice = f"{root}={key}"
        assert zckpt("convert", path, tmp_path / root, "--root", choice).code == 0
        assert_is_root(tmp_path / root, pairs[root], "")
        alone = ("--root", root, "--weights-only")
        assert zckpt("convert", path, tmp_path / f"{root}-weights", *alone).code == 0


def test_two_optimizers_of_one_model(tmp_path: Path, zckpt: Program) -> None:
    """As of a program that trains matrices by one optimizer and vectors by another."""
    torch.manual_seed(0)
    model = Net(5)
    named = list(model.named_parameters())
    matrices = torch.optim.SGD([p for _, p in named if p.ndim > 1], lr=0.1, momentum=0.9)
    vectors = torch.optim.AdamW([p for _, p in named if p.ndim == 1], lr=0.01)
    for optimizer in (matrices, vectors):
        train((model, optimizer), 2, seed=1)
    path = tmp_path / "run.pt"
    optimizers = [matrices.state_dict(), vectors.state_dict()]
    torch.save({"model": model.state_dict(), "optimizers": optimizers}, path)
    report = zckpt("inspect", path, "--json").document
    assert report["roots"] == {"model": ["optimizers.0", "optimizers.1"]}
    assert report["optimizer"] == "SGD, AdamW"
    assert [len(group) > 0 for group in report["groups"]] == [True, True]
    assert zckpt("verify", path).code == 0
    for name, parameter in named:
        optimizer, slot = (
            (vectors, "exp_avg") if parameter.ndim == 1 else (matrices, "momentum_buffer")
        )
        assert same_bits(zckpt_load(path, f"{name}/{slot}"), optimizer.state[parameter][slot])
    refused = zckpt("convert", path, tmp_path / "t")
    assert refused.code == 1
    assert "--root model=optimizers.0" in refused.err
    chosen = zckpt("convert", path, tmp_path / "t", "--root", "model=optimizers.0")
    assert chosen.code == 0
    assert "left out: optimizers.1: --root selects model (optimizers.0)" in chosen.out
    assert zckpt("convert", path, tmp_path / "w", "--weights-only").code == 0


@pytest.mark.parametrize(
    ("root", "said"),
    [
        ("discrimnator", "Did you mean discriminator?"),
        ("xyz", "its models are generator, discriminator"),
        ("generator=optimizer_h", "Did you mean optimizer_"),
    ],
)
def test_a_root_that_is_not_there(
    root: str, said: str, checkpoints: dict[str, Path], zckpt: Program
) -> None:
    for path in checkpoints.values():
        refused = zckpt("inspect", path, "--root", root)
        assert refused.code == 2
        assert said in refused.err


def test_a_root_of_one_model(gan: Gan, tmp_path: Path, zckpt: Program) -> None:
    """Its own name is taken, and no other."""
    model, optimizer = gan.models["generator"]
    path = tmp_path / "run.pt"
    torch.save({"net": model.state_dict(), "optim": optimizer.state_dict()}, path)
    assert zckpt("inspect", path, "--root", "net").code == 0
    refused = zckpt("verify", path, "--root", "generator")
    assert refused.code == 2
    assert "leave out --root" in refused.err
    refused = zckpt("verify", path, "--against", path, "--root", "generator")
    assert refused.code == 2


def test_gather_proves_the_elements_of_all(checkpoints: dict[str, Path], zckpt: Program) -> None:
    path = checkpoints["dcp"]
    assert zckpt("verify", path, "--against", path, "--gather").code == 0
    refused = zckpt("verify", path, "--against", path, "--gather", "--root", "generator")
    assert refused.code == 2


def test_a_program_loads_one_of_them(gan: Gan, checkpoints: dict[str, Path]) -> None:
    model, _ = gan.models["discriminator"]
    for path in checkpoints.values():
        other = trained(9)[0]
        state = {"model": get_model_state_dict(other)}
        dcp.load(state, storage_reader=StorageReader(path, root="discriminator"))
        for name, value in model.state_dict().items():
            assert same_bits(state["model"][name], value), name


# -- Accelerate's second model


@pytest.fixture(scope="module")
def of_accelerate(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Pair], Path]:
    """Two models that real Accelerate saved: as files of torch.save."""
    pairs = {"model": trained(0), "model_1": trained(1)}
    accelerator = Accelerator(cpu=True)
    prepared = [accelerator.prepare(*pair) for pair in pairs.values()]
    folder = tmp_path_factory.mktemp("accelerate") / "state"
    accelerator.save_state(str(folder), safe_serialization=False)
    assert len(prepared) == 2
    return pairs, folder


def assert_are_accelerates(
    pairs: dict[str, Pair], path: Path, tmp_path: Path, zckpt: Program
) -> None:
    report = zckpt("inspect", path, "--json").document
    assert list(report["roots"]) == ["model", "model_1"]
    assert [len(own) for own in report["roots"].values()] == [1, 1]
    assert zckpt("verify", path).code == 0
    for root, pair in pairs.items():
        assert_is_root(path, pair, f"{root}.")
        assert_is_root(path, pair, "", root=root)
    refused = zckpt("convert", path, tmp_path / "t")
    assert refused.code == 1
    assert "--root model" in refused.err
    for number, words in enumerate(OF_ACCELERATE):  # of which each has a place for both
        target = tmp_path / f"all-{number}"
        written = zckpt("convert", path, target, *words)
        assert written.code == 0, written.err
        assert "(model, model_1)" in written.out
        found = zckpt("verify", target, "--against", path)
        assert (" has the same bytes " if "optim" in report["roots"]["model"] else " equals ") in (
            found.out
        )
        again = tmp_path / f"again-{number}"  # and zckpt reads what it stated of each
        assert zckpt("reshard", target, again).code == 0
        assert list(package.read(again).roots) == ["model", "model_1"]
        assert len(package.read(again).buffers) == 6
        for root, pair in pairs.items():
            assert_is_root(again, pair, f"{root}.")


OF_ACCELERATE = [
    ("--to", "dcp", "--dialect", "accelerate", "--dp", "3"),
    ("--to", "gathered", "--dialect", "accelerate"),
]


def test_second_model_in_whole_files(
    of_accelerate: tuple[dict[str, Pair], Path], tmp_path: Path, zckpt: Program
) -> None:
    pairs, folder = of_accelerate
    assert (folder / "pytorch_model_1.bin").is_file()
    assert_are_accelerates(pairs, folder, tmp_path, zckpt)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for name in ("pytorch_model_1.bin", "optimizer_1.bin"):
        (copy / name).unlink()
    assert zckpt("verify", folder, "--against", copy).code == 3
    assert zckpt("diff", folder, copy).code == 3


def test_second_model_in_whole_files_of_fsdp(
    of_accelerate: tuple[dict[str, Pair], Path], tmp_path: Path, zckpt: Program
) -> None:
    pairs, folder = of_accelerate
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for old in sorted(copy.glob("pytorch_model*.bin")):
        old.rename(copy / old.name.replace("pytorch_model", "pytorch_model_fsdp"))
    assert_are_accelerates(pairs, copy, tmp_path, zckpt)


def test_second_model_in_safetensors(tmp_path: Path, zckpt: Program) -> None:
    """Sorted names do not show whose state is whose: the user gives names, of both or of one."""
    pairs = trained(0), trained(1)
    accelerator = Accelerator(cpu=True)
    assert [accelerator.prepare(*pair) for pair in pairs]
    folder = tmp_path / "state"
    accelerator.save_state(str(folder))
    report = zckpt("inspect", folder, "--json").document
    assert report["roots"] == {"model": ["optim"], "model_1": ["optim_1"]}
    assert report["slots"]["state"]["tensors"] == 20
    assert zckpt("verify", folder).code == 0
    names = tmp_path / "names.txt"
    own = [name for name, _ in pairs[1][0].named_parameters()]
    names.write_text("\n".join(own))
    chosen = ("--root", "model_1", "--param-names", names)
    assert zckpt("convert", folder, tmp_path / "t", *chosen).code == 0
    assert_is_root(tmp_path / "t", pairs[1], "")
    both = (*OF_ACCELERATE[0], "--param-names", names)
    refused = zckpt("convert", folder, tmp_path / "both", *OF_ACCELERATE[0])
    assert refused.code == 1
    assert "with its model's key: model.NAME and model_1.NAME" in refused.err
    names.write_text("\n".join(f"{root}.{name}" for root in ("model", "model_1") for name in own))
    assert zckpt("convert", folder, tmp_path / "both", *both).code == 0
    for root, pair in zip(("model", "model_1"), pairs, strict=True):
        assert_is_root(tmp_path / "both", pair, f"{root}.")
    changed = (*both, "--rename", "emb=embed")
    refused = zckpt("convert", folder, tmp_path / "renamed", *changed)
    assert refused.code == 2
    assert "--rename is for one model" in refused.err


def test_second_model_in_folders(tmp_path: Path, zckpt: Program) -> None:
    """Laid out as Accelerate 1.15 does with SHARDED_STATE_DICT."""
    pairs = {"model": trained(0), "model_1": trained(1)}
    folder = tmp_path / "state"
    for number, (model, optimizer) in enumerate(pairs.values()):
        state = {"model": get_model_state_dict(model)}
        dcp.save(state, checkpoint_id=folder / f"pytorch_model_fsdp_{number}")
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder / f"optimizer_{number}")
    assert_are_accelerates(pairs, folder, tmp_path, zckpt)
    assert zckpt("verify", folder, "--against", folder, "--gather").code == 0
    lost = Path(shutil.copytree(folder, tmp_path / "lost"))
    shutil.rmtree(lost / "optimizer_0")
    said = zckpt("inspect", lost, "--json").document
    assert said["roots"] == {"model": [], "model_1": ["optimizer_1"]}
    assert texts(said["problems"]) == [
        "optimizer_1 exists, but optimizer_0 does not: it may be lost"
    ]
    refused = zckpt("convert", lost, tmp_path / "ds", "--to", "deepspeed", "--root", "model")
    assert (
        "nothing shows that an optimizer trains the weights in model [optimizer-missing]\n"
        "Hint: write" in refused.err
    )
    target = tmp_path / "resharded"
    assert zckpt("reshard", folder, target, "--root", "model_1", "--dp", "3").code == 0
    assert sorted(path.name for path in target.iterdir()) == ["optimizer_0", "pytorch_model_fsdp_0"]
    resumed = trained(9)
    state = {"model": get_model_state_dict(resumed[0])}
    dcp.load(state, checkpoint_id=target / "pytorch_model_fsdp_0")
    set_model_state_dict(resumed[0], state["model"])
    state = {"optimizer": get_optimizer_state_dict(*resumed)}
    dcp.load(state, checkpoint_id=target / "optimizer_0")
    set_optimizer_state_dict(*resumed, state["optimizer"])
    assert train(resumed, 3, seed=5) == train(trained(1), 3, seed=5)
    with pytest.raises(errors.UnsupportedCheckpoint, match="several models"):
        StorageReader(folder)


def test_one_of_two_models_gets_its_own_scheduler(
    of_accelerate: tuple[dict[str, Pair], Path], tmp_path: Path, zckpt: Program
) -> None:
    """Of two of one program, as the number says; the others are named."""
    folder = tmp_path / "state"
    shutil.copytree(of_accelerate[1], folder)
    for name in ("scheduler.bin", "scheduler_1.bin"):
        torch.save({"last_epoch": len(name)}, folder / name)
    to = ("--to", "dcp", "--dialect", "accelerate")
    both = zckpt("convert", folder, tmp_path / "both", *to)
    assert both.code == 0
    for name in ("scheduler.bin", "scheduler_1.bin", "random_states_0.pkl"):
        assert (tmp_path / "both" / name).read_bytes() == (folder / name).read_bytes()
    for root, name, other in (
        ("model", "scheduler.bin", "scheduler_1.bin"),
        ("model_1", "scheduler_1.bin", "scheduler.bin"),
    ):
        written = zckpt("convert", folder, tmp_path / root, *to, "--root", root)
        assert written.code == 0
        assert f"left out: {other}: --root selects {root}" in written.out
        assert (tmp_path / root / "scheduler.bin").read_bytes() == (folder / name).read_bytes()
        assert not (tmp_path / root / "scheduler_1.bin").exists()
    (tmp_path / "both" / "scheduler_1.bin").unlink()
    found = zckpt("verify", tmp_path / "both", "--against", folder)
    assert found.code == 3
    assert "scheduler_1.bin" in found.out


def test_models_without_optimizers(
    of_accelerate: tuple[dict[str, Pair], Path], tmp_path: Path, zckpt: Program
) -> None:
    pairs, folder = of_accelerate
    for number, words in enumerate(OF_ACCELERATE):
        target = tmp_path / str(number)
        assert zckpt("convert", folder, target, *words, "--weights-only").code == 0
        for root, (model, _) in pairs.items():
            for name, value in model.state_dict().items():
                assert same_bits(zckpt_load(target, f"{root}.{name}/param"), value), name


def test_two_models_in_one_file_keep_their_own_keys(tmp_path: Path, zckpt: Program) -> None:
    """Their names are Accelerate's, but nothing else: a target has no place for both unasked."""
    state: dict[str, Any] = {}
    for root, key, pair in (("model", "optim", trained(0)), ("model_1", "optim_1", trained(1, 6))):
        state[root] = get_model_state_dict(pair[0])
        state[key] = get_optimizer_state_dict(*pair)
    dcp.save(state, checkpoint_id=tmp_path / "run")
    refused = zckpt("reshard", tmp_path / "run", tmp_path / "t")
    assert refused.code == 1
    assert "or write all models with --dialect accelerate" in refused.err
    done = zckpt("reshard", tmp_path / "run", tmp_path / "t", "--dialect", "accelerate")
    assert done.code == 0
    assert zckpt("verify", tmp_path / "t", "--against", tmp_path / "run").code == 0


def test_two_adafactors(tmp_path: Path, zckpt: Program) -> None:
    """States that are no tensors of the weight's shape are each model's own, too."""
    folder = tmp_path / "state"
    for number, seed in enumerate((0, 1)):
        model, optimizer = trained(seed, kind=torch.optim.Adafactor)
        state = {"model": get_model_state_dict(model)}
        dcp.save(state, checkpoint_id=folder / f"pytorch_model_fsdp_{number}")
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=folder / f"optimizer_{number}")
    for number, words in enumerate(OF_ACCELERATE):
        target = tmp_path / str(number)
        assert zckpt("convert", folder, target, *words).code == 0
        for root in ((), ("--root", "model"), ("--root", "model_1")):
            found = zckpt("verify", target, "--against", folder, *root)
            assert found.code == 0, found.out
        assert zckpt("reshard", target, tmp_path / f"again-{number}").code == 0
        assert zckpt("verify", tmp_path / f"again-{number}", "--against", folder).code == 0


@pytest.fixture
def two_models(tmp_path: Path) -> Path:
    """A generator and a discriminator of other widths, as Accelerate saves them."""
    accelerator = Accelerator(cpu=True)
    for pair in (trained(0, 5, torch.optim.SGD), trained(1, 4)):
        accelerator.prepare(*pair)
    accelerator.save_state(str(tmp_path / "two"), safe_serialization=False)
    return tmp_path / "two"


def test_an_optimizer_belongs_to_its_model_whatever_is_lost(
    two_models: Path, tmp_path: Path, zckpt: Program
) -> None:
    (two_models / "optimizer.bin").unlink()
    said = zckpt("inspect", two_models, "--json").document
    assert said["roots"] == {"model": [], "model_1": ["optim_1"]}
    # the target's optimizer has names, which both models have; the shapes are those of one
    again = ("convert", two_models, tmp_path / "again", "--to", "gathered")
    assert zckpt(*again, "--dialect", "safetensors").code == 0
    assert "taken for" not in zckpt("inspect", tmp_path / "again").err
    lost = f"{two_models}/optimizer_1.bin exists, but optimizer.bin does not: it may be lost"
    assert lost in texts(said["problems"])
    assert lost in zckpt("verify", two_models).err
    changed = Path(shutil.copytree(two_models, tmp_path / "changed"))
    optimizer = torch.load(changed / "optimizer_1.bin")
    optimizer["state"][0]["exp_avg"] += 1
    torch.save(optimizer, changed / "optimizer_1.bin")
    assert zckpt("verify", changed, "--against", two_models).code == 3
    chosen = zckpt("convert", two_models, tmp_path / "ds", "--to", "deepspeed", "--root", "model_1")
    assert chosen.code == 0
    assert "exp_avg" in zckpt("inspect", tmp_path / "ds").out


def test_a_lost_first_model_is_named(tmp_path: Path, zckpt: Program) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model_1.safetensors")
    said = zckpt("inspect", tmp_path)
    assert "model_1.safetensors exists, but model.safetensors does not: it may be" in said.err


def test_files_that_no_reader_takes_are_compared(tmp_path: Path, zckpt: Program) -> None:
    """Also beside weights alone, whose configurations may differ."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        torch.save({"w": torch.ones(3)}, tmp_path / name / "model.pt")
        torch.save({"step": ord(name)}, tmp_path / name / "sampler_7.bin")
        (tmp_path / name / "config.json").write_text(name)
    said = zckpt("verify", tmp_path / "a", "--against", tmp_path / "b")
    assert said.code == 3
    assert "sampler_7.bin: " in said.out
    assert "config.json" not in said.out
    assert zckpt("verify", tmp_path / "a", "--against", tmp_path / "b", "--weights-only").code == 0


def test_an_optimizer_that_fits_another_model_too(tmp_path: Path, zckpt: Program) -> None:
    """A teacher that is not trained, and a student: the numbers say that the teacher is trained."""
    accelerator = Accelerator(cpu=True)
    teacher, (student, optimizer) = Net(5), trained(1)
    accelerator.prepare(teacher, student, optimizer)
    run = tmp_path / "run"
    accelerator.save_state(str(run), safe_serialization=False)
    way = "--root model_1=optim"
    said = zckpt("inspect", run)
    assert f"also fits model_1, which has no optimizer; if it belongs there, add {way}" in said.err
    chosen = ("convert", run, tmp_path / "out", "--root", "model_1")
    refused = zckpt(*chosen, "--to", "deepspeed")
    assert refused.code == 1
    assert "holds no optimizer state" not in refused.err
    assert f"name it: {way}; or write only the weights: --weights-only" in refused.err
    alone = zckpt(*chosen, "--to", "gathered")
    assert f"nothing shows that optim trains it; if it does, add {way}" in alone.err
    right = zckpt("convert", run, tmp_path / "right", *way.split(), "--to", "deepspeed")
    assert right.code == 0
    assert_is_root(tmp_path / "right", (student, optimizer), "")


def test_averages_have_no_optimizer_of_their_own(tmp_path: Path, zckpt: Program) -> None:
    model, optimizer = trained(0)
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**whole, "ema": model.state_dict()}, tmp_path / "run.pt")
    way = ("convert", tmp_path / "run.pt", tmp_path / "out", "--root", "ema", "--to")
    refused = zckpt(*way, "deepspeed")
    assert refused.code == 1
    assert "nothing shows that an optimizer trains the weights in ema" in refused.err
    assert "name it: --root ema=optimizer; or write only the weights: --weights-only" in refused.err
