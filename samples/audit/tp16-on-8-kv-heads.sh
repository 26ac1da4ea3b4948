#!/bin/bash
# Tensor parallelism over 16 ranks for a model with 8 key-value heads: frameworks fail deep inside a reshape, or cut
# heads silently. `check` reports it before a run, and says what would work.
. "$(dirname "$0")/lib.sh"

expect 1 "tp=16 exceeds num_key_value_heads = 8" --mesh tp=16 --world 16
expect 0 "" --mesh tp=8,dp=2 --world 16
