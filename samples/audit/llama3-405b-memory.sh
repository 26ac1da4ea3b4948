#!/bin/bash
# What each rank holds of Llama 3.1 405B while it trains on 16,384 ranks: why the model has 126 layers (with the embedding
# and the head they make 128 = 16 x 8), and what sharding over data and context parallelism saves.
. "$(dirname "$0")/lib.sh"

expect 0 "405,853,388,800 parameters" --mesh tp=8,pp=16,dp=128 --world 16384
expect 0 "405,853,388,800 parameters" --mesh tp=8,pp=16,dp_replicate=128 --world 16384
