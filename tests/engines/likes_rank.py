"""What ranks do that train a Llama: as GPTModel of Megatron-Core, or of transformers under FSDP2.

    python -c 'from tests.engines.likes_rank import main; main()' CASES.json ROOT

Each case is one job, whose ranks are forked from this process. Losses, gradients and updates are
the engines' own. A case has these keys:

    name, engine    its folder in ROOT; "megatron" or "fsdp"
    world, tp, pp   the sizes; the text has a row for every rank of FSDP
    load            the run or directory that it loads; None: it draws its own weights
    steps           the updates; ROOT/NAME/losses.json has the loss before each
    save            after so many updates it saves; None: it does not save

ROOT/NAME/rank-R.pt is what Megatron's optimizers hold once they are loaded, or when they save.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from .families_rank import config_of
from .megatron_rank import FusedAdam, drawn, fork, global_name, load, record, stub_cuda

ADAM = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-7}
DECAY = 0.1


def join(rank: int, case: dict[str, Any], root: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(root / case["name"] / "store"), case["world"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case["world"])


def write_losses(losses: list[float], rank: int, folder: Path) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, losses)
    if rank == 0:
        known = [each for each in everyone if each is not None and all(v == v for v in each)]
        means = [sum(values) / len(known) for values in zip(*known, strict=True)]
        (folder / "losses.json").write_text(json.dumps(means))


# -- Megatron-Core


def megatron(rank: int, case: dict[str, Any], given: dict[str, Any], root: Path) -> None:
    from megatron.core import optimizer, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    tp, pp, values = case["tp"], case["pp"], given["config"]
    parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=True)
    tensor_parallel.random.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
    optimizer.Adam = optimizer.distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    optimizer.distrib_optimizer.HAVE_APEX_OR_TE = True
    optimizer.distrib_optimizer.USING_APEX_OPTIMIZER = True
    config = config_of(
        values,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
    )
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(None, False, normalization="RMSNorm"),
        case["rows"],
        values["max_position_embeddings"],
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        parallel_output=True,
    )
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layers = values["num_hidden_layers"]
    names = {}
    for name, parameter in model.named_parameters():
        whole = global_name(name, stage * layers // pp, 0)
        names[parameter] = whole
        salt = (tp_rank if getattr(parameter, "tensor_model_parallel", False) else 0) + case["salt"]
        center = float(parameter.dim() == 1)
        parameter.data.copy_(center + drawn(whole, salt, parameter.shape) / 5)
    settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = DistributedDataParallel(config, settings, model)
    steps = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=case["lr"],
            weight_decay=DECAY,
            adam_beta1=ADAM["betas"][0],
            adam_beta2=ADAM["betas"][1],
            adam_eps=ADAM["eps"],
            use_distributed_optimizer=True,
            clip_grad=0.0,
        ),
        [wrapped],
    )
    rng_state = ShardedObject("rng_state", [{}], (pp, tp), (stage, tp_rank), replica_id=0)
    own = root / case["name"]
    if case["load"]:
        load(Path(case["load"]), [wrapped], steps, (tp, pp), rng_state)
        record(steps, names, {}, own / f"rank-{rank}.pt")
        groups = [group for group in steps.param_groups if group["params"]]
        (own / f"groups-{rank}.json").write_text(
            json.dumps([{k: v for k, v in group.items() if k != "params"} for group in groups])
        )
    losses = []
    for step in range(case["steps"]):
        if step == case["save"]:
            save(case, given, own, wrapped, steps, rng_state, step)
            record(steps, names, {}, own / f"rank-{rank}.pt")
        wrapped.zero_grad_buffer()
        steps.zero_grad()
        for group in steps.param_groups:  # as Megatron-LM's scheduler does
            group["weight_decay"] = DECAY * group["wd_mult"]
        losses.append(go_forward(wrapped, given["text"], config.hidden_size, first, last))
        done, _, _ = steps.step()
        assert done
    if case["steps"] == case["save"]:
        save(case, given, own, wrapped, steps, rng_state, case["save"])
        record(steps, names, {}, own / f"rank-{rank}.pt")
    write_losses(losses, rank, own)


def go_forward(wrapped: Any, rows: list[list[int]], hidden: int, first: bool, last: bool) -> float:
    """The loss of the text, and its gradients; NaN on a rank without the last stage."""
    text = torch.tensor(rows)
    count, length = text.shape
    positions = torch.arange(length).expand(count, -1)
    mask = torch.ones(length, length).triu(1).bool()[None, None]
    rank = dist.get_rank()
    received = None
    if not first:
        received = torch.empty(length, count, hidden)
        dist.recv(received, rank - 1)
        received.requires_grad_()
        wrapped.module.set_input_tensor(received)
    labels = text.roll(-1, 1)
    result = wrapped(text, positions, mask, labels=labels if last else None)
    if not last:
        dist.send(result.detach().contiguous(), rank + 1)
        gradient = torch.empty_like(result)
        dist.recv(gradient, rank + 1)
        result.backward(gradient)
        return float("nan")
    loss = result[:, :-1].mean()
    loss.backward()
    if received is not None:
        assert received.grad is not None
        dist.send(received.grad.contiguous(), rank - 1)
    return float(loss.detach())


def save(
    case: dict[str, Any],
    given: dict[str, Any],
    own: Path,
    wrapped: Any,
    steps: Any,
    rng_state: Any,
    step: int,
) -> None:
    from megatron.core import dist_checkpointing

    folder = own / f"iter_{step:07d}"
    if dist.get_rank() == 0:
        folder.mkdir()
        (own / "latest_checkpointed_iteration.txt").write_text(str(step))
    dist.barrier()
    content = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }
    values = given["config"]
    saved = wrapped.module.sharded_state_dict(metadata=content)
    state = {
        "args": argparse.Namespace(
            tensor_model_parallel_size=case["tp"],
            pipeline_model_parallel_size=case["pp"],
            world_size=case["world"],
            data_parallel_size=1,
            swiglu=True,
            use_distributed_optimizer=True,
            num_attention_heads=values["num_attention_heads"],
            group_query_attention=True,
            num_query_groups=values["num_key_value_heads"],
            padded_vocab_size=case["rows"],
            vocab_size=values["vocab_size"],
            untie_embeddings_and_output_weights=True,
            iteration=step,
            consumed_train_samples=step * 8,
        ),
        "checkpoint_version": 3.0,
        "iteration": step,
        "num_floating_point_operations_so_far": 7.0,
        "opt_param_scheduler": {"max_lr": case["lr"], "num_steps": step * 8},
        "model": saved,
        "optimizer": steps.sharded_state_dict(saved, metadata=content),
        "rng_state": rng_state,
    }
    dist_checkpointing.save(state, str(folder), content_metadata=content)


# -- transformers


def network_of(values: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    known = {key: value for key, value in values.items() if key != "model_type"}
    return LlamaForCausalLM(LlamaConfig(**known, attn_implementation="eager"))


def grouped(network: Any) -> list[dict[str, Any]]:
    """As Megatron-Core groups them: tensors of one axis are not decayed."""
    parameters = list(network.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def own_loss(network: Any, rank: int, given: dict[str, Any]) -> Any:
    text = torch.tensor([given["text"][rank % len(given["text"])]])
    return network(input_ids=text, labels=text).loss


def fsdp(rank: int, case: dict[str, Any], given: dict[str, Any], root: Path) -> None:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    network = network_of(given["config"])
    mesh = init_device_mesh("cpu", (case["world"],))
    for layer in network.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    groups = grouped(network)
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    own = root / case["name"]

    def states() -> dict[str, Any]:
        model, optim = get_state_dict(network, optimizer)
        return {"model": model, "optim": optim}

    if case["load"]:
        loaded = states()
        dcp.load(loaded, checkpoint_id=case["load"])
        set_state_dict(
            network,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optim"],
        )
        for group, expected in zip(optimizer.param_groups, (DECAY, 0.0), strict=True):
            assert group["weight_decay"] == expected, group
            assert {key: group[key] for key in ADAM} == ADAM, group
    losses = []
    for step in range(case["steps"]):
        if step == case["save"]:
            dcp.save(states(), checkpoint_id=own / "dcp")
        loss = own_loss(network, rank, given)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    if case["steps"] == case["save"]:
        dcp.save(states(), checkpoint_id=own / "dcp")
    write_losses(losses, rank, own)


ENGINES = {"megatron": megatron, "fsdp": fsdp}


def run(rank: int, case: dict[str, Any], given: dict[str, Any], root: Path) -> None:
    join(rank, case, root)
    ENGINES[case["engine"]](rank, case, given, root)
    dist.barrier()


def main() -> None:
    given, root = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    import torch._dynamo

    if any(case["engine"] == "megatron" for case in given["cases"]):
        torch.compile = lambda function: function  # type: ignore[assignment]
        stub_cuda()
    for case in given["cases"]:
        (root / case["name"]).mkdir(parents=True)
        fork(case["name"], case["world"], partial(run, case=case, given=given, root=root))
