"""Bytes of the parts of a training step, from a model's shape and the configuration."""

from __future__ import annotations

import math

from posttune.config.models import MemoryConfig, ModelConfig, OptimizerConfig
from posttune.plan.shapes import ModelShape

MIB = 2**20
BLOCK_8, BLOCK_4 = 256, 128  # weights that share a scale
SMALL = 4096  # numbers; smaller tensors keep whole moments
PIECES = 4.3  # copies of a piece of logits: measured, 1,090 MiB at 256 MiB
WHOLE = 6.3  # copies of whole logits with their entropy: measured, 1,868 MiB at 297 MiB


def moments(shape: ModelShape, config: OptimizerConfig) -> int:
    """Bytes of the optimiser's state."""
    return sum(_of_one(dims, shape.trained_item, config) for dims in shape.trained)


def _of_one(dims: tuple[int, ...], item: int, config: OptimizerConfig) -> int:
    count = math.prod(dims)
    if config.name == "adafactor":
        return 4 * (math.prod(dims[:-2]) * (dims[-2] + dims[-1]) if len(dims) > 1 else count)
    if config.name in ("adamw", "torchao_adamw"):
        return 2 * item * count
    if config.name == "bnb_adamw_8bit":
        return 2 * 4 * count if count < SMALL else _in_blocks(count, 8, BLOCK_8)
    bits, block = (4, BLOCK_4) if config.name == "torchao_adamw_4bit" else (8, BLOCK_8)
    return 2 * item * count if count < SMALL or count % block else _in_blocks(count, bits, block)


def _in_blocks(count: int, bits: int, block: int) -> int:
    """Two moments of ``bits``, each with a scale a block and a table."""
    scales, table = -(-count // block), 1 << bits
    return 2 * (count * bits // 8 + 4 * (scales + table))


def largest(shape: ModelShape) -> int:
    """Numbers of the largest trained weight."""
    return max(map(math.prod, shape.trained))


def gradients(shape: ModelShape, config: OptimizerConfig) -> int:
    """Bytes of the gradients where they are most."""
    return shape.trained_item * (largest(shape) if config.in_backward else shape.trained_count)


def moments_on_device(shape: ModelShape, config: OptimizerConfig) -> int:
    """Bytes of the moments that are on the device while the model learns."""
    if not config.offload:
        return moments(shape, config)
    return max(_of_one(dims, shape.trained_item, config) for dims in shape.trained)


def activations(shape: ModelShape, model: ModelConfig, memory: MemoryConfig, tokens: int) -> int:
    """Bytes that the layers keep of one micro-batch for the backward pass, at their highest."""
    if not model.gradient_checkpointing:
        kept, working = shape.activation_bytes, shape.largest_layer_bytes
    else:
        kept, working = shape.layers * shape.hidden * shape.item, 2 * shape.largest_layer_bytes
    return tokens * (working + (0 if memory.activations == "host" else kept))


def passing(shape: ModelShape, tokens: int) -> int:
    """Bytes of a forward pass without gradient."""
    return tokens * shape.largest_layer_bytes


def logits(shape: ModelShape, memory: MemoryConfig, tokens: int) -> int:
    """Bytes of logits and what is computed of them."""
    whole = 4 * tokens * shape.vocabulary
    limit = memory.logits_mib * MIB
    return int(WHOLE * whole) if whole <= limit else int(PIECES * limit)


def cache(shape: ModelShape, sequences: int, length: int, item: int) -> int:
    """Bytes of an engine's key-value cache."""
    return sequences * length * shape.key_values * item
