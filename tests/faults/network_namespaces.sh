#!/bin/bash
# Runs a program as ranks on two "hosts" that are network namespaces of this machine, joined by a virtual cable, so that
# every message between the two crosses a network.
#
#   tests/faults/network_namespaces.sh RANKS_ON_EACH PROGRAM [ARGUMENT ...]
#
# Exit code 77: namespaces cannot be made on this machine.
set -u

if [ "${1:-}" = agent ]; then
  # mpirun starts its helper on a host through this instead of ssh: agent HOST COMMAND ...
  host=$2
  shift 2
  exec ip netns exec "$RESHARD_TEST_NET-${host##*.}" sh -c "$*"
fi

export RESHARD_TEST_NET="reshard-$$"
each=$1
shift
trap 'for i in 1 2; do ip netns del "$RESHARD_TEST_NET-$i"; done 2> /dev/null' EXIT
{
  ip netns add "$RESHARD_TEST_NET-1" && ip netns add "$RESHARD_TEST_NET-2" &&
    ip link add "rs$$a" netns "$RESHARD_TEST_NET-1" type veth peer name "rs$$b" netns "$RESHARD_TEST_NET-2" &&
    ip -n "$RESHARD_TEST_NET-1" addr add 10.77.0.1/24 dev "rs$$a" &&
    ip -n "$RESHARD_TEST_NET-2" addr add 10.77.0.2/24 dev "rs$$b" &&
    ip -n "$RESHARD_TEST_NET-1" link set "rs$$a" up && ip -n "$RESHARD_TEST_NET-2" link set "rs$$b" up &&
    ip -n "$RESHARD_TEST_NET-1" link set lo up && ip -n "$RESHARD_TEST_NET-2" link set lo up
} 2> /dev/null || exit 77

ip netns exec "$RESHARD_TEST_NET-1" mpirun --allow-run-as-root --oversubscribe -n $((2 * each)) \
  --host "10.77.0.1:$each,10.77.0.2:$each" -x RESHARD_TEST_NET \
  ${ASAN_OPTIONS:+-x ASAN_OPTIONS} \
  --mca plm_rsh_agent "$(realpath "$0") agent" \
  --mca btl self,tcp --mca btl_tcp_if_include 10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24 "$@"
