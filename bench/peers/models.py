"""The model of a task, for peers that run transformers' modules: the task's shape with random weights."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from batond.bench.peers.task import PeerMissingError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from batond.bench.peers.task import Task


def require_device(task: Task) -> torch.device:
    """The task's device.

    Raises:
        PeerMissingError: There is none such.
    """
    device = torch.device(task.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise PeerMissingError(f"device {task.device}: this process sees no card")
    return device


def config_of(task: Task) -> PretrainedConfig:
    """The task's shape, with as many positions as its longest request needs."""
    fields = {name: value for name, value in task.model.items() if name != "model_type"}
    config = AutoConfig.for_model(task.model["model_type"], **fields)
    config.max_position_embeddings = max(config.max_position_embeddings, task.longest_tokens)
    return config


def build(task: Task) -> Any:
    """Make the model on its device; equal tasks give equal weights.

    Raises:
        PeerMissingError: There is no such device.
    """
    device = require_device(task)
    if task.threads:
        torch.set_num_threads(task.threads)
    torch.manual_seed(task.seed)
    with device:
        model = AutoModelForCausalLM.from_config(config_of(task), dtype=getattr(torch, task.dtype))
    return model.eval()


def versions(task: Task) -> dict[str, str]:
    """Of what such a peer consists."""
    about = {name: version(name) for name in ("torch", "transformers")}
    device = torch.device(task.device)
    if device.type == "cuda":
        about["card"] = torch.cuda.get_device_name(device)
    return about
