"""Does the hint of a refusal lead to something that works, and not back to where it began?

Each hint is followed as a user follows it: the path that it names is given instead, the option or
the command that it names is typed. A hint with several ways out is followed in all of them. What
comes after may be refused once more, by another sentence, whose hint is followed in turn.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from ..conftest import EXAMPLE, ROOT, Result

Program = Callable[..., Result]
Words = tuple[str, ...]
DATA = ROOT / "tests" / "data"
TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
COMMAND = re.compile(r"`?zckpt ((?:convert|reshard|export) [^`;]+)`?")
OPTION = re.compile(r"(--[a-z][a-z-]+)(?: (?!FILE)([^\s,;:()|]+))?")
ALONE = {"--weights-only"}  # options without a value
MOST = 3  # hints, one after another


class Follower:
    """Follows hints in `folder`, where targets are made; `names` is the file behind FILE."""

    def __init__(self, zckpt: Program, folder: Path, names: Path | None = None) -> None:
        self.zckpt, self.folder, self.names = zckpt, folder, names

    def target(self) -> str:
        return os.path.join(tempfile.mkdtemp(dir=self.folder), "target")

    def follow(self, words: Words, before: tuple[Words, ...] = ()) -> None:
        """Every way that the hints show from a command ends in one that works."""
        assert words not in before, f"a circle: {before}"
        assert len(before) <= MOST, f"too many hints: {before}"
        shown = self.zckpt(*words)
        if shown.code == 0:
            return
        line = next((each for each in shown.err.splitlines() if each.startswith("Hint: ")), "")
        following = [
            way
            for part in re.split(r"; (?:or )?|, or ", line[6:])
            for way in self.ways(part, words)
        ]
        assert following, f"{' '.join(words)} leads nowhere: {shown.err}"
        for way in following:
            self.follow(way, (*before, words))

    def ways(self, hint: str, words: Words) -> Iterator[Words]:
        """The commands that a part of a hint shows."""
        if match := COMMAND.search(hint):
            typed = match[1].split()
            yield tuple(self.target() if word == "DST" else word for word in typed)
            return
        if match := re.search(r"copy the directory without (\S+), and give the copy", hint):
            copy = self.target()
            given = Path(words[1])
            folder = given if given.is_dir() else given.parent
            shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(match[1]))
            yield (words[0], copy, *words[2:])
            return
        paths = [each for each in re.findall(r"/[^\s,:;]+", hint) if Path(each).exists()]
        options = [match.groups() for match in OPTION.finditer(hint)]
        if options:
            typed = []
            for flag, value in options:
                value = str(self.names) if flag == "--param-names" else value
                if flag == "--tag" and paths:  # choose a tag with --tag: FOLDER has TAGS
                    value = re.findall(r" has ([^\s,]+)", hint)[0]
                typed += [flag] if flag in ALONE else [flag, str(value)]
            rest = list(words[2:])
            if len(rest) > 0 and not rest[0].startswith("-"):
                rest[0] = self.target()
            yield (*words[:2], *rest, *typed)
        elif paths:
            yield (words[0], paths[0], *words[2:])


def refused(zckpt: Program, *words: object) -> bool:
    return zckpt(*words).code != 0


@pytest.fixture
def follow(zckpt: Program, tmp_path: Path) -> Callable[..., None]:
    """Follows the hint of a command that is refused."""

    def run(*words: object, names: Sequence[str] = ()) -> None:
        file = tmp_path / "names.txt"
        file.write_text("\n".join(names))
        typed = tuple(map(str, words))
        assert refused(zckpt, *typed), "this is not refused"
        Follower(zckpt, tmp_path, file).follow(typed)

    return run


# -- every file and folder of checkpoints of many programs

TREES = {
    "DeepSpeed": EXAMPLE,
    "Trainer": TRAINER,
    "FSDP2": DATA / "fsdp2-2.13.0-w2",
    "AutoModel": DATA / "automodel-0.7.0-w2",
    "AutoModel, LoRA": DATA / "automodel-0.7.0-lora-w2",
    "Accelerate, LoRA": DATA / "accelerate-1.14.0-lora-w2",
    "torchao": DATA / "torchao-0.18.0",
    "torch_checkpointing": DATA / "torch_checkpointing-0.1.1-w2" / "items",
    "Megatron-Core": DATA / "megatron-0.16.1-tp2",
    "Megatron-Core, old": DATA / "megatron-0.16.1-legacy-tp2",
    "Megatron-Core, experts": DATA / "megatron-0.16.1-legacy-ep2",
    "ONNX Runtime": DATA / "onnxruntime" / "legacy-post5478__fp16__adam__dp3",
    "ONNX Runtime, two forms": DATA / "onnxruntime" / "real-ort-1.16.3__fp32__adam__dp1",
}


@pytest.mark.parametrize("name", TREES)
def test_any_part_of_a_checkpoint(name: str, tmp_path: Path, zckpt: Program) -> None:
    tree = tmp_path / "run"
    shutil.copytree(TREES[name], tree)
    follower, count = Follower(zckpt, tmp_path), 0
    for path in sorted(tree.rglob("*")):
        count += refused(zckpt, "inspect", path)
        follower.follow(("inspect", str(path)))
    assert count


# -- directories around checkpoints


def laid(folder: Path, *names: str, source: Path = EXAMPLE) -> Path:
    """A folder in which copies of a checkpoint have these names."""
    for name in names:
        shutil.copytree(source, folder / name)
    return folder


LAYOUTS: dict[str, tuple[str, ...]] = {
    "verl": ("global_step_5/actor", "global_step_5/critic", "global_step_10/actor"),
    "verl, of one model": ("global_step_5/actor",),
    "verl, a step": ("actor", "critic"),
    "OpenRLHF": ("_actor", "_critic"),
    "runs of several kinds": ("adam", "sgd"),
    "several runs": ("a/run/checkpoints", "b/run/checkpoints"),
}


def of_verl(folder: Path) -> Path:
    """The files of one rank, as verl's workers name them."""
    (folder / "huggingface").mkdir(parents=True)
    model, optimizer = trained(0)
    optimizer["param_groups"][0]["param_names"] = [*NAMES]
    torch.save(model, folder / "model_world_size_1_rank_0.pt")
    torch.save(optimizer, folder / "optim_world_size_1_rank_0.pt")
    torch.save({"lr_scheduler": None}, folder / "extra_state_world_size_1_rank_0.pt")
    (folder / "huggingface" / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_of_a_run(
    name: str, tmp_path: Path, zckpt: Program, follow: Callable[..., None]
) -> None:
    """The hint names a checkpoint inside, and no command for a Trainer's run."""
    run = tmp_path / "run"
    for inside in LAYOUTS[name]:
        if name.startswith("verl"):
            of_verl(run / inside)
        else:
            shutil.copytree(EXAMPLE, run / inside)
    (run / "latest_checkpointed_iteration.txt").write_text("5")
    hint = zckpt("inspect", run).err.splitlines()[-1]
    assert any(str(run / inside) in hint for inside in LAYOUTS[name])
    assert "--checkpoints" not in hint
    follow("inspect", run)
    follow("reshard", run, tmp_path / "out")


def test_a_trainers_run(tmp_path: Path, zckpt: Program, follow: Callable[..., None]) -> None:
    run = laid(tmp_path / "run", "checkpoint-4", "checkpoint-12", source=TRAINER)
    assert f"`zckpt reshard {run} DST --checkpoints all`" in zckpt("inspect", run).err
    follow("inspect", run)
    (run / "checkpoint-3").mkdir()  # of a save that did not finish: not all can be written
    assert "--checkpoints" not in zckpt("inspect", run).err
    follow("inspect", run)


def test_two_tags(tmp_path: Path, follow: Callable[..., None]) -> None:
    run = laid(tmp_path / "run", "global_step7", "global_step9", source=EXAMPLE / "global_step7")
    follow("inspect", run)
    (run / "latest").write_text("global_step8")
    follow("inspect", run)


# -- files of torch.save


def trained(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """State dicts of a model, in which shapes repeat, and of its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return dict(model.state_dict()), optimizer.state_dict()


NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")


def test_state_dicts(tmp_path: Path, follow: Callable[..., None]) -> None:
    run, (model, optimizer) = tmp_path / "run", trained(0)
    run.mkdir()
    torch.save(model, run / "model.pt")
    torch.save(optimizer, run / "optim.pt")
    follow("inspect", run / "optim.pt")
    both = {"model": model, "optimizer": optimizer}
    for name in ("epoch_9.pt", "epoch_10.pt"):
        (tmp_path / "epochs").mkdir(exist_ok=True)
        torch.save(both, tmp_path / "epochs" / name)
    follow("inspect", tmp_path / "epochs")


def test_several_models(tmp_path: Path, follow: Callable[..., None]) -> None:
    pairs = [trained(0), trained(1)]
    keys = ("generator", "optimizer_g"), ("discriminator", "optimizer_d")
    gan = {
        key: value
        for names, pair in zip(keys, pairs, strict=True)
        for key, value in zip(names, pair, strict=True)
    }
    torch.save(gan, tmp_path / "gan.pt")
    for to in ("dcp", "gathered", "universal"):
        follow("convert", tmp_path / "gan.pt", tmp_path / to, "--to", to)
    unclear = dict(zip(("student", "first", "critic", "second"), gan.values(), strict=True))
    torch.save(unclear, tmp_path / "unclear.pt")
    follow("convert", tmp_path / "unclear.pt", tmp_path / "a", "--to", "dcp", "--root", "student")


@pytest.mark.parametrize("kind", ["pytorch_model_fsdp.bin", "model.safetensors"])
def test_two_models_of_accelerate(
    kind: str, tmp_path: Path, zckpt: Program, follow: Callable[..., None]
) -> None:
    from safetensors.torch import save_file

    run = tmp_path / "run"
    run.mkdir()
    numbered = kind.endswith(".safetensors")  # FSDP's optimizers know names
    for number in (0, 1):
        model, optimizer = trained(number)
        end = f"_{number}" if number else ""
        if numbered:
            save_file(model, run / f"model{end}.safetensors")
        else:
            torch.save(model, run / f"pytorch_model_fsdp{end}.bin")
            names = optimizer["param_groups"][0]["params"] = [*NAMES]
            optimizer["state"] = dict(zip(names, optimizer["state"].values(), strict=True))
        torch.save(optimizer, run / f"optimizer{end}.bin")
    torch.save({"step": 3}, run / "random_states_0.pkl")
    for name in ("optimizer.bin", "optimizer_1.bin", "random_states_0.pkl"):
        follow("inspect", run / name)
    if not numbered:
        follow("convert", run, tmp_path / "out", "--to", "dcp")
        follow("convert", run, tmp_path / "out", "--to", "deepspeed")
        follow("export", run, tmp_path / "out")
        return
    to = ("--to", "dcp", "--dialect", "accelerate")
    both = [f"{root}.{name}" for root in ("model", "model_1") for name in NAMES]
    hint = zckpt("convert", run, tmp_path / "out", *to).err
    assert "--param-names FILE, each prefixed" in hint
    assert "--root model --param-names FILE" in hint
    (tmp_path / "both.txt").write_text("\n".join(both))
    (tmp_path / "one.txt").write_text("\n".join(NAMES))
    ways = (
        ("--param-names", tmp_path / "both.txt"),
        ("--root", "model", "--param-names", tmp_path / "one.txt"),
    )
    for number, way in enumerate(ways):
        assert zckpt("convert", run, tmp_path / f"out-{number}", *to, *way).code == 0


def test_parameters_without_names(tmp_path: Path, follow: Callable[..., None]) -> None:
    from safetensors.torch import save_file

    run = tmp_path / "run"
    run.mkdir()
    model, optimizer = trained(0)
    save_file(model, run / "model.safetensors")
    torch.save(optimizer, run / "optimizer.pt")
    for to in ("deepspeed", "dcp"):
        follow("convert", run, tmp_path / "out", "--to", to, names=NAMES)


def test_a_warning_names_the_dialect_that_the_trainer_loads(tmp_path: Path, zckpt: Program) -> None:
    """By the program's own files: FSDP's whole and sharded ones, those of DDP, and DeepSpeed's."""
    from safetensors.torch import save_file

    runs = {name: tmp_path / name for name in ("whole", "ddp")}
    for name, run in runs.items():
        run.mkdir()
        model, optimizer = trained(0)
        group = optimizer["param_groups"][0]
        if name == "ddp":
            save_file(model, run / "model.safetensors")
            group["param_names"] = [*NAMES]
        else:
            torch.save(model, run / "pytorch_model_fsdp.bin")
            group["params"] = [*NAMES]
            optimizer["state"] = dict(zip(NAMES, optimizer["state"].values(), strict=True))
        torch.save(optimizer, run / "optimizer.bin")
        torch.save({"step": 3}, run / "random_states_0.pkl")
    sharded = runs["sharded"] = tmp_path / "sharded"
    dialect = ("--dialect", "accelerate")
    assert zckpt("convert", runs["whole"], sharded, "--to", "dcp", *dialect).code == 0
    runs["deepspeed"] = TRAINER
    fsdp, ddp = "--dialect accelerate (FSDP)", "--dialect safetensors (DDP, or one GPU)"
    expected = {
        ("whole", "dcp"): fsdp,
        ("sharded", "gathered"): fsdp,
        ("ddp", "dcp"): fsdp,
        ("deepspeed", "dcp"): fsdp,
        ("deepspeed", "gathered"): f"{ddp} or {fsdp}",
        ("whole", "gathered"): None,
        ("sharded", "dcp"): None,
        ("ddp", "gathered"): None,
    }
    for (name, to), way in expected.items():
        out = tmp_path / f"{name}-{to}"
        said = zckpt("convert", runs[name], out, "--to", to)
        assert said.code == 0, said.err
        assert ("the trainer does not find" in said.err) == (way is not None), (name, to)
        if way is not None:
            assert f"to resume with it, add {way} [program-must-set]\n" in said.err
            typed = way.partition(" (")[0].split()
            again = zckpt(
                "convert", runs[name], tmp_path / f"{name}-{to}-again", "--to", to, *typed
            )
            assert again.code == 0
            assert "the trainer does not find" not in again.err
            assert "load_state(" in again.out or "resume_from_checkpoint=" in again.out


def test_the_best_checkpoint_is_proposed_where_it_lies(tmp_path: Path, zckpt: Program) -> None:
    """`--checkpoints` writes what lies beside, and keeps the format."""
    run = laid(tmp_path / "run", "checkpoint-4", source=TRAINER)
    path = run / "checkpoint-4" / "trainer_state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "best_model_checkpoint": "/gone/run/checkpoint-2"}))
    source = run / "checkpoint-4"
    said = zckpt("reshard", source, tmp_path / "a", "--dp", "2").err
    assert "names the best checkpoint /gone/run/checkpoint-2" in said
    assert "--checkpoints" not in said
    laid(run, "checkpoint-2", source=TRAINER)
    command = f"zckpt reshard {run} DST --checkpoints best-and-last"
    assert command in zckpt("reshard", source, tmp_path / "b", "--dp", "2").err
    to = ("--to", "dcp", "--dialect", "accelerate")
    assert "--checkpoints" not in zckpt("convert", source, tmp_path / "c", *to).err
    Follower(zckpt, tmp_path).follow(tuple(command.replace("DST", str(tmp_path / "d")).split()[1:]))


# -- weights, several models, and names


def test_a_folder_of_automodel_without_its_optimizer(
    tmp_path: Path, zckpt: Program, follow: Callable[..., None]
) -> None:
    """The weights are meant, and not the random states beside them."""
    for name in ("AutoModel", "AutoModel, LoRA"):
        run = tmp_path / name.replace(", ", "-")
        shutil.copytree(TREES[name], run, ignore=shutil.ignore_patterns("optim"))
        assert f"the checkpoint in it: {run}/model" in zckpt("inspect", run).err
        for words in (("inspect", run), ("reshard", run, tmp_path / f"out-{run.name}")):
            follow(*words)


def test_files_of_steps_beside_the_last_one(
    tmp_path: Path, zckpt: Program, follow: Callable[..., None]
) -> None:
    model, optimizer = trained(0)
    steps = tmp_path / "run" / "checkpoints"
    steps.mkdir(parents=True)
    for path in (steps / "step1.pt", steps / "step2.pt", steps.parent / "final.pt"):
        torch.save({"model": model, "optimizer": optimizer}, path)
    torch.save({"losses": [torch.ones(2)]}, steps.parent / "losses.pt")  # no checkpoint
    assert zckpt("inspect", steps.parent).code == 0
    assert "--tag step2.pt" in zckpt("inspect", steps).err
    follow("inspect", steps)
    (steps.parent / "notes.pt").write_bytes((steps / "step1.pt").read_bytes())
    torch.save([model, optimizer], steps.parent / "list.pt")
    assert "not a dictionary of tensors" in zckpt("inspect", steps.parent / "list.pt").err
    assert "the checkpoint that contains it" not in zckpt("inspect", steps.parent / "list.pt").err


def test_models_in_lists(tmp_path: Path, zckpt: Program, follow: Callable[..., None]) -> None:
    pairs = [trained(0), trained(1)]
    lists = {
        "models": [model for model, _ in pairs],
        "optimizers": [optimizer for _, optimizer in pairs],
    }
    torch.save(lists, tmp_path / "x.pt")
    shown = zckpt("inspect", tmp_path / "x.pt").out
    assert "models.0 (optimizers.0), models.1 (optimizers.1)" in shown
    for to in ("dcp", "gathered", "deepspeed", "universal"):
        follow("convert", tmp_path / "x.pt", tmp_path / "out", "--to", to)
    target = tmp_path / "second"
    said = zckpt("convert", tmp_path / "x.pt", target, "--to", "gathered", "--root", "models.1")
    assert said.code == 0
    written = torch.load(target / "x.pt")
    assert torch.equal(written["models"][1]["0.weight"], pairs[1][0]["0.weight"])
    assert written["models"][0] is written["optimizers"][0] is None


def test_names_in_a_wrong_order(tmp_path: Path, follow: Callable[..., None]) -> None:
    model, optimizer = trained(0)
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "x.pt")
    wrong = tmp_path / "wrong.txt"
    for names in (NAMES[::-1], NAMES[:2]):
        wrong.write_text("\n".join(names))
        words = ("--to", "dcp", "--param-names", wrong)
        follow("convert", tmp_path / "x.pt", tmp_path / "out", *words, names=NAMES)


@pytest.mark.parametrize("to", ["gathered", "dcp", "deepspeed"])
def test_an_optimizer_that_is_not_the_first(to: str, tmp_path: Path, zckpt: Program) -> None:
    """Lightning resumes no module with its state alone."""
    model, optimizer = trained(0)
    run = {"pytorch-lightning_version": "2.6.0", "state_dict": model}
    torch.save({**run, "optimizer_states": [optimizer, optimizer]}, tmp_path / "x.ckpt")
    for number in (0, 1):
        root = f"state_dict=optimizer_states.{number}"
        target = tmp_path / f"{number}"
        said = zckpt("convert", tmp_path / "x.ckpt", target, "--to", to, "--root", root)
        assert said.code == 0
        assert ("trainer.fit(" in said.out) == (number == 0)


def test_averages_of_lightning(tmp_path: Path, follow: Callable[..., None]) -> None:
    (model, optimizer), (averages, _) = trained(0), trained(1)
    run = {
        "pytorch-lightning_version": "2.6.0",
        "state_dict": averages,
        "current_model_state": model,
        "averaging_state": {"n_averaged": torch.tensor(3)},
        "optimizer_states": [optimizer],
    }
    torch.save(run, tmp_path / "x.ckpt")
    for to in ("dcp", "deepspeed"):
        follow("convert", tmp_path / "x.ckpt", tmp_path / "out", "--to", to)


def test_two_models_of_accelerate_around_deepspeed(
    tmp_path: Path, zckpt: Program, follow: Callable[..., None]
) -> None:
    """`latest` names the model that was saved last, as if it were the only one."""
    run = laid(
        tmp_path / "run", "pytorch_model", "pytorch_model_1", source=EXAMPLE / "global_step7"
    )
    (run / "latest").write_text("pytorch_model_1")
    for name in ("scheduler.bin", "scheduler_1.bin", "random_states_0.pkl"):
        torch.save({"name": name}, run / name)
    assert "2 checkpoints" in zckpt("inspect", run).err
    follow("inspect", run)
    follow("reshard", run, tmp_path / "out", "--dp", "2")
    target = tmp_path / "second"
    assert zckpt("reshard", run, target, "--dp", "2", "--tag", "pytorch_model_1").code == 0
    assert (target / "pytorch_model").is_dir()  # what a program with one model looks for
    assert torch.load(target / "scheduler.bin") == {"name": "scheduler_1.bin"}


def shifted(value: Any, number: int) -> None:
    """Gives another model other values: adds a number to a rank's part of a tensor."""
    part = getattr(value, "_local_tensor", None)
    if part is not None and part.is_floating_point():
        part += number


def test_ranks_files_of_two_models(
    tmp_path: Path, zckpt: Program, follow: Callable[..., None]
) -> None:
    """Accelerate's, of FSDP2 with `use_dcp=False` (1.15)."""
    items = DATA / "torch_checkpointing-0.1.1-w2" / "items"
    run = tmp_path / "run"
    run.mkdir()
    for number, rank in itertools.product((0, 1), (0, 1)):
        for item, name in (("model", "pytorch_model_fsdp"), ("optimizer", "optimizer")):
            state = torch.load(items / f"{item}_{rank}.pt", weights_only=False)
            for value in tree_leaves(state):
                shifted(value, number)
            torch.save(state, run / f"{name}_{number}_rank{rank}.bin")
    shown = zckpt("inspect", run).out
    assert "pytorch_model_fsdp_0 (optimizer_0), pytorch_model_fsdp_1 (optimizer_1)" in shown
    for to in ("dcp", "gathered", "deepspeed"):
        follow("convert", run, tmp_path / "out", "--to", to)


# -- lines for a shell


def typed(zckpt: Program, before: str, *words: object) -> None:
    """Types what the hint of a refusal has after `before`, up to a semicolon of the sentence."""
    shown = zckpt(*words)
    assert shown.code != 0
    hint = next(line for line in shown.err.splitlines() if line.startswith("Hint: "))
    assert before in hint
    subprocess.run(hint.partition(before)[2], shell=True, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.skipif(shutil.which("zip") is None, reason="needs zip")
@pytest.mark.parametrize("is_renamed", [False, True])
def test_an_unpacked_file(is_renamed: bool, example: Path, tmp_path: Path, zckpt: Program) -> None:
    """Some programs unpack what torch.save wrote, because it is a zip."""
    tag = example / "global_step7"
    for name in ("mp_rank_00_model_states", "bf16_zero_pp_rank_1_mp_rank_00_optim_states"):
        shutil.unpack_archive(tag / f"{name}.pt", tag, "zip")
        (tag / f"{name}.pt").unlink()
        if is_renamed:
            (tag / name).rename(tag / f"{name}.pt")
        assert "is an unpacked file of torch.save" in zckpt("inspect", tag / name).err or is_renamed
        typed(zckpt, "torch.save: ", "inspect", example)
    assert zckpt("verify", example, "--against", EXAMPLE).code == 0
    torch.load(tag / "mp_rank_00_model_states.pt", weights_only=False)


def test_an_unpacked_file_alone(tmp_path: Path, zckpt: Program) -> None:
    torch.save(trained(0)[0], tmp_path / "model.pt")
    shutil.unpack_archive(tmp_path / "model.pt", tmp_path, "zip")
    (tmp_path / "model.pt").unlink()
    typed(zckpt, "torch.save: ", "inspect", tmp_path / "model")
    assert zckpt("inspect", tmp_path / "model.pt").code == 0


def test_folders_of_nodes(tmp_path: Path, zckpt: Program) -> None:
    """Each node has saved on its own disk: the file that one lacks is in the folder of another."""
    nodes = [tmp_path / "run" / f"node{number}" for number in (0, 1)]
    for number, node in enumerate(nodes):
        shutil.copytree(EXAMPLE, node)
        for rank in (2, 3) if number == 0 else (0, 1):
            next(node.rglob(f"*pp_rank_{rank}_*")).unlink()
    (nodes[1] / "latest").unlink()
    (nodes[1] / "global_step7" / "mp_rank_00_model_states.pt").unlink()
    for node, other in (nodes, nodes[::-1]):
        assert f"{other} has " in zckpt("inspect", node).err
    typed(zckpt, "together: ", "inspect", nodes[0])
    assert zckpt("verify", nodes[0], "--against", EXAMPLE).code == 0


def test_a_folder_that_the_trainer_has_not_renamed(tmp_path: Path, zckpt: Program) -> None:
    """The Trainer renames `tmp-checkpoint-4` when rank 0 has saved; other nodes may still save."""
    run = tmp_path / "run"
    lacking = {"checkpoint-4": ("*rank_1_*",), "tmp-checkpoint-4": ("*pp_rank_0_*", "mp*")}
    for name, patterns in lacking.items():
        shutil.copytree(TRAINER, run / name)
        for pattern in patterns:
            for file in (run / name).rglob(pattern):
                file.unlink()
    for given in ("checkpoint-4", "tmp-checkpoint-4"):
        hint = zckpt("inspect", run / given).err
        assert f"cp -rn {run}/tmp-checkpoint-4/. {run}/checkpoint-4" in hint
    typed(zckpt, "together: ", "inspect", run / "checkpoint-4")
    assert zckpt("verify", run / "checkpoint-4", "--against", TRAINER).code == 0


def test_two_runs_are_no_two_nodes(tmp_path: Path, zckpt: Program) -> None:
    """The same ranks' files are there: another run has the same names."""
    for name in ("run1", "run2"):
        shutil.copytree(EXAMPLE, tmp_path / name)
    next((tmp_path / "run1").rglob("*rank_2_*")).unlink()
    assert "together" not in zckpt("inspect", tmp_path / "run1").err


def test_what_check_proposes_for_fsdp(tmp_path: Path, zckpt: Program) -> None:
    """A Trainer's checkpoint gets the files that the Trainer looks for."""
    fix = next(
        line.partition("zckpt ")[2]
        for line in zckpt("check", TRAINER, "--for", "dcp").out.splitlines()
        if "makes it fit" in line
    )
    assert fix.endswith("--dialect accelerate")
    assert zckpt(*fix.replace("DST", str(tmp_path / "out")).split()).code == 0
    assert zckpt("check", tmp_path / "out", "--for", "dcp").code == 0


def test_a_lost_optimizer(tmp_path: Path, zckpt: Program, follow: Callable[..., None]) -> None:
    """All files of the optimizer, or one of them: each hint ends in weights, and in no circle."""
    for name, pattern in (("all", "*optim_states.pt"), ("one", "*rank_2_*optim_states.pt")):
        run = Path(shutil.copytree(EXAMPLE, tmp_path / name))
        for file in run.rglob(pattern):
            file.unlink()
        for words in (
            ("convert", run, tmp_path / "out", "--to", "dcp"),
            ("convert", run, tmp_path / "out"),
            ("reshard", run, tmp_path / "out", "--dp", "2"),
        ):
            way = zckpt(*words).err.rpartition("`zckpt ")[2].partition("`")[0]
            target = Path(tempfile.mkdtemp(dir=tmp_path)) / "target"
            assert zckpt(*way.replace("DST", str(target)).split()).code == 0
