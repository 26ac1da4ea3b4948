#!/bin/bash
# Three rows of the table of degrees in the Llama 3 paper (arXiv 2407.21783, table 4): two multiply to the number of GPUs
# beside them, the third, as first printed with DP=4, to half of it. DP=8 is what fits.
. "$(dirname "$0")/lib.sh"

expect 0 "" --mesh tp=8,cp=1,pp=16,dp=64 --world 8192 --sequence 8192
expect 0 "" --mesh tp=8,cp=1,pp=16,dp=128 --world 16384 --sequence 8192
expect 1 "the degrees multiply to 8,192 ranks, and there are 16,384" --mesh tp=8,cp=16,pp=16,dp=4 --world 16384 --sequence 131072
expect 0 "" --mesh tp=8,cp=16,pp=16,dp=8 --world 16384 --sequence 131072
