"""The optimiser that a configuration names."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from posttune.config.models import OptimizerConfig
from posttune.errors import ModelError, UserError

LIBRARIES = {"torchao": "torchao", "bnb": "bitsandbytes"}  # also the names of the extras
_TORCHAO = {"torchao_adamw": "_AdamW", "torchao_adamw_8bit": "AdamW8bit", "torchao_adamw_4bit": "AdamW4bit"}


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimiser over the trainable parameters; vectors (norms, biases) are not decayed.

    Of torch's AdamW the fused kernel is used wherever there is one: on two CPU cores it took a quarter of
    the time of the other two at 0.6 M parameters and a sixth at 10 M.
    Raises `ModelError` where nothing is to be trained, `UserError` where a library is missing or cannot
    train these parameters.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise ModelError(
            "the model has no parameter to train", fix="check which modules lora.target_modules names"
        )
    groups: list[dict[str, Any]] = [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    check_parameters(params, config)
    return _build(groups, params, config)


def check_parameters(params: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
    """Raise `UserError` where the optimiser cannot train these parameters."""
    params = list(params)
    cut = any(isinstance(param, DTensor) for param in params)
    if config.stochastic_rounding and all(param.dtype != torch.bfloat16 for param in params):
        fix = "set model.dtype: bfloat16, or leave stochastic_rounding out"
        what = f"the weights are {str(params[0].dtype).removeprefix('torch.')}: nothing is rounded"
        raise UserError(what, who="optimizer.stochastic_rounding", fix=fix)
    if cut and config.name != "adamw":
        fix = "set name: adamw, or parallel.data_shard: 1"
        raise UserError("it does not train weights that are cut", who=_who(config), fix=fix)
    if cut and (config.offload or config.in_backward):
        field = "offload" if config.offload else "in_backward"
        fix = "leave it out: sharding already divides gradients and moments by the processes"
        raise UserError("it does not go with weights that are cut", who=f"optimizer.{field}", fix=fix)


def _build(groups: list[dict[str, Any]], params: list[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    betas = (config.betas[0], config.betas[1])
    if config.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=config.lr, weight_decay=config.weight_decay)
    if config.name == "adamw":
        fused = {param.device.type for param in params} <= {"cpu", "cuda"}
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)
    if config.name == "bnb_adamw_8bit":
        made = _library("bitsandbytes.optim", config).AdamW8bit(
            groups, lr=config.lr, betas=betas, eps=config.eps
        )
    else:
        kind = getattr(_library("torchao.optim", config), _TORCHAO[config.name])
        rounding = config.stochastic_rounding
        made = kind(groups, lr=config.lr, betas=betas, eps=config.eps, bf16_stochastic_round=rounding)
    return cast(Optimizer, made)


def _library(module: str, config: OptimizerConfig) -> Any:
    """The library's module. Raises `UserError` where it is missing."""
    name = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        fix = f"pip install 'posttune[{name}]', or choose another such as adamw or adafactor"
        raise UserError(f"{name} cannot be imported: {error}", who=_who(config), fix=fix) from error


def _who(config: OptimizerConfig) -> str:
    return f"optimizer.name: {config.name}"


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give all groups a learning rate. Some optimisers keep theirs in a tensor."""
    for group in optimizer.param_groups:
        set_group_lr(group, lr)


def set_group_lr(group: dict[str, Any], lr: float) -> None:
    """The same for one group."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
