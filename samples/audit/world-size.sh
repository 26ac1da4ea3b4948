#!/bin/bash
# The degrees of the long-context stage of Llama 3.1 405B (arXiv 2407.21783, table 4) are TP 8, CP 16, PP 16 on 16,384
# GPUs. With DP 4 they multiply to half of that; DP 8 fits. The table's two rows without CP are right.
. "$(dirname "$0")/lib.sh"

expect 0 "" --mesh tp=8,cp=1,pp=16,dp=64 --world 8192 --sequence 8192
expect 0 "" --mesh tp=8,cp=1,pp=16,dp=128 --world 16384 --sequence 8192
expect 1 "the degrees multiply to 8,192 ranks, but --world is 16,384" --mesh tp=8,cp=16,pp=16,dp=4 --world 16384 --sequence 131072
expect 0 "" --mesh tp=8,cp=16,pp=16,dp=8 --world 16384 --sequence 131072
