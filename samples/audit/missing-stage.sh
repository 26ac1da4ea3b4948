#!/bin/bash
# A checkpoint of two pipeline stages. The second one was not copied: ranks 4 to 7, layers 2 and 3.
. "$(dirname "$0")/lib.sh"
make_temporary

cp -r samples/checkpoints/pp2_tp4/. "$temporary"
rm "$temporary"/checkpoint/__[4-7]_0.distcp
show 0 "" verify samples/checkpoints/pp2_tp4/checkpoint --mesh pp=2,tp=4
show 1 "4 data files of 8 are missing" verify "$temporary/checkpoint" --mesh pp=2,tp=4
