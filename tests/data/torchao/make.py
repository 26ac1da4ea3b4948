"""Saves tensors in torchao's classes in DIRECTORY: TORCHDYNAMO_DISABLE=1 python make.py DIRECTORY

The files in this directory were saved by torch 2.15 with torchao 0.18."""
import os
import sys

import torch
import torch.distributed.checkpoint as dcp
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.prototype.moe_training.config import Float8TrainingOpConfig
from torchao.prototype.moe_training.tensor import Float8TrainingWeightWrapperTensor
from torchao.prototype.quantized_training.int8_mixed_precision import (
    Int8MixedPrecisionTrainingConfig, Int8MixedPrecisionTrainingLinearWeight)

matrix = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
# Classes that change how a weight is multiplied, and store it as it is.
weights = {
    "float8": WeightWithDynamicFloat8CastTensor(matrix.t(), LinearMMConfig(), torch.float8_e4m3fn),
    "experts": torch.nn.Parameter(Float8TrainingWeightWrapperTensor(torch.arange(24.0).reshape(2, 3, 4), Float8TrainingOpConfig())),
    "int8": Int8MixedPrecisionTrainingLinearWeight(matrix, Int8MixedPrecisionTrainingConfig()),
}
# AdamW8bit's state: codes, a scale for each block, a table.
moments = {"exp_avg": OptimState8bit.zeros((4, 6), signed=True, block_size=24), "step": torch.tensor(2.0)}
whole = {"model": weights, "optimizer": {"state": {"int8": moments}, "param_groups": [{"lr": 0.5, "params": ["int8"]}]}}

torch.save(weights, os.path.join(sys.argv[1], "weights.pt"))
torch.save(whole, os.path.join(sys.argv[1], "run.pt"))
dcp.save(whole, checkpoint_id=os.path.join(sys.argv[1], "dcp"), no_dist=True)
