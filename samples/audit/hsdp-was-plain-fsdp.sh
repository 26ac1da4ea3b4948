#!/bin/bash
# HSDP over 2 replicas x 8 shards was configured, plain FSDP over 16 ran (a real checkpoint of 16 ranks): every rank held
# half of what it should, and every collective crossed the whole job. The checkpoint itself is whole.
. "$(dirname "$0")/lib.sh"

show 1 "found plain FSDP over 16" verify samples/checkpoints/fsdp16/checkpoint --mesh dp_replicate=2,dp_shard=8
show 0 "" verify samples/checkpoints/hsdp2x4/checkpoint --mesh dp_replicate=2,dp_shard=4
