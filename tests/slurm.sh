#!/bin/bash
# Runs conversions under a real Slurm: a controller and three nodes. Each node is a group of namespaces of this machine
# with its own host name, network address, /tmp and /dev/shm, and can be ended as if it lost power. See docs/testing.md.
#
#   [RESHARD=build/release/reshard] tests/slurm.sh
#
# Installs Debian's slurm-wlm if it is missing. All files are in a temporary directory (15 GB under TMPDIR), and all
# processes in a namespace that ends with the script. Exit code 77: not root, or no namespaces here.
set -u -o pipefail

nodes=(n1 n2 n3)
cpus=2

if [ "${1:-}" != inside ]; then
  program=$(realpath "${RESHARD:-$(dirname "$0")/../build/release/reshard}")
  [ -x "$program" ] || { echo "slurm: there is no $program" >&2; exit 1; }
  [ "$(id -u)" = 0 ] && unshare --mount --pid --net --uts --ipc --fork --mount-proc ip link add type veth 2> /dev/null ||
    { echo "slurm: skipped: needs root and namespaces" >&2; exit 77; }
  if ! command -v slurmctld slurmd srun munged mpirun > /dev/null; then
    { apt-get update -q && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
      slurm-wlm munge openmpi-bin; } > /dev/null || exit 1
  fi
  work=$(mktemp -d) || exit 1
  # Makes a control group of 512 MiB, of version 2, or of version 1 below the current one.
  if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    group=/sys/fs/cgroup/$(basename "$work") limit=memory.max
  else
    group=/sys/fs/cgroup/memory$(sed -n 's/^[0-9]*:memory://p' /proc/self/cgroup)/$(basename "$work")
    limit=memory.limit_in_bytes
  fi
  { mkdir "$group" && echo $((512 << 20)) > "$group/$limit"; } 2> /dev/null || echo "slurm: no control group of 512 MiB here"
  trap 'rm -rf "$work"; rmdir "$group" 2> /dev/null' EXIT
  chmod 755 "$work"
  cp "$program" "$work/reshard" && cp "$0" "$work/slurm.sh" || exit 1
  unshare --mount --pid --net --uts --ipc --fork --kill-child --mount-proc "$work/slurm.sh" inside "$work" "$group" &
  trap 'kill -KILL %1' HUP INT TERM  # and with it all that is inside
  wait %1
  exit
fi

# ---- the cluster

mount --bind "$2" /mnt && cd /mnt || exit 1
export SLURM_CONF=/mnt/slurm.conf PATH=$PATH:/usr/sbin:/sbin
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
passed=0
failed=0
declare -A init  # by node: the process whose end is the node's

pass() { passed=$((passed + 1)); echo "ok      $1"; }
fail() { failed=$((failed + 1)); echo "FAILED  $1"; [ -z "${2:-}" ] || sed 's/^/        /' "$2" | tail -n 25; }
# Checks an expectation by a command. If that fails, shows a file that explains more.
expect() {
  local what=$1 log=$2
  shift 2
  if "$@"; then pass "$what"; else fail "$what" "$log"; fi
}
wait_for() {  # SECONDS COMMAND ...
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    [ $SECONDS -lt $end ] || return 1
    sleep 0.05
  done
}

# Starts a node in new namespaces, as their first process. Its address follows from its number.
start_node() {
  local name=$1 number=${1#n}
  mkdir -p "spool.$name"
  unshare --mount --pid --net --uts --ipc --fork --kill-child --mount-proc bash -c '
    hostname "$1" && mount -t tmpfs -o size=1g tmpfs /tmp && mount -t tmpfs -o size=1g tmpfs /dev/shm || exit 1
    until ip link show eth0 > /dev/null 2>&1; do sleep 0.02; done
    ip link set lo up && ip addr add "10.78.0.${1#n}/24" dev eth0 && ip link set eth0 up || exit 1
    slurmd -D -N "$1"
  ' _ "$name" > "node.$name.log" 2>&1 &
  local unshared=$!
  wait_for 10 pgrep -P $unshared > /dev/null
  init[$name]=$(pgrep -P $unshared)
  ip link add "to-$name" type veth peer name eth0 netns "${init[$name]}" &&
    ip link set "to-$name" master cluster && ip link set "to-$name" up
}

# Sends no signal and closes no connection, so the others notice only silence.
pull_the_plug() {
  ip link del "to-$1"
  kill -KILL "${init[$1]}"
}

state_is() { [ "$(sinfo -h -n "$1" -o %t)" = "$2" ]; }
job_is() { scontrol show job "$1" 2> /dev/null | grep -q "JobState=$2 "; }

hostname login
ip link set lo up
ip link add cluster type bridge && ip addr add 10.78.0.254/24 dev cluster && ip link set cluster up || exit 1
for node in login "${nodes[@]}"; do
  [ "$node" = login ] && echo "127.0.0.1 localhost" || echo "10.78.0.${node#n} $node"
done > hosts
echo "10.78.0.254 login" >> hosts
mount --bind hosts /etc/hosts
{
  cat << EOF
ClusterName=reshard
SlurmctldHost=login(10.78.0.254)
AuthType=auth/munge
AuthInfo=socket=/mnt/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmctldPidFile=/mnt/slurmctld.pid
SlurmctldLogFile=/mnt/slurmctld.log
SlurmdPidFile=/mnt/slurmd.%n.pid
SlurmdLogFile=/mnt/slurmd.%n.log
SlurmdSpoolDir=/mnt/spool.%n
StateSaveLocation=/mnt/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
SlurmdTimeout=10
MpiDefault=none
MailProg=/bin/true
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
EOF
  for node in "${nodes[@]}"; do
    echo "NodeName=$node NodeAddr=10.78.0.${node#n} CPUs=$cpus"
  done
} > slurm.conf
mkdir state && head -c 32 /dev/urandom > munge.key && chmod 600 munge.key
munged --force --key-file=/mnt/munge.key --socket=/mnt/munge.socket --pid-file=/mnt/munged.pid \
  --log-file=/mnt/munged.log --seed-file=/mnt/munged.seed || exit 1
slurmctld -i 2> slurmctld.err || exit 1
for node in "${nodes[@]}"; do start_node "$node"; done
for node in "${nodes[@]}"; do
  wait_for 20 state_is "$node" idle || { fail "node $node comes up" "slurmd.$node.log"; exit 1; }
done
sinfo --version

# ---- a checkpoint of 3 GB of four ranks, and what one process makes of it

reshard=/mnt/reshard
"$reshard" synth src --model llama3-1b --layers 16 --mesh tp=4 -q && "$reshard" convert src one --to hf -q || exit 1

# Returns whether a directory equals the output of one process, and removes it if so.
same() { diff -q one "$1" > diff.log && [ ! -e "$1.partial" ] && rm -r "$1"; }
# Returns whether the journal records enough for a run to resume.
recorded() { [ "$(cat "$1.partial/.reshard-partial"* 2> /dev/null | wc -c)" -gt 5000 ]; }
# Slurm waits two minutes before it restarts a job, because it refuses credentials that are used again at once.
start_again() {
  wait_for 30 eval "scontrol show job $1 | grep -q Restarts=1" && sleep 5 && scontrol update jobid="$1" starttime=now "${@:2}"
}
touch signal.log limit.log node.log

# Runs the program until its journal has an entry; then stops it, as a file system that hangs would, until a signal
# arrives.
cat > hanging << 'EOF'
#!/bin/bash
destination=$1
shift
"$@" &
program=$!
trap 'kill -CONT $program' TERM  # which Slurm sends to every process of the step
if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then
  until [ "$(cat "$destination.partial/.reshard-partial"* 2> /dev/null | wc -c)" -gt 5000 ]; do
    kill -0 $program 2> /dev/null || break
    sleep 0.01
  done
  kill -STOP $program
fi
while kill -0 $program 2> /dev/null; do
  wait $program
  code=$?
done
exit $code
EOF
chmod +x hanging

echo "== ranks"
for strategy in direct exchange; do
  srun --mpi=pmix -N 2 -n 4 "$reshard" convert src many --to hf --strategy $strategy > run.log 2>&1
  expect "srun --mpi=pmix, 4 ranks on 2 nodes, $strategy" run.log same many
done
salloc -N 2 -n 4 mpirun "$reshard" convert src many --to hf > run.log 2>&1
expect "mpirun in an allocation" run.log same many
srun --mpi=none -n 4 "$reshard" convert src many --to hf > run.log 2>&1
code=$?
expect "srun without an MPI is refused" run.log [ "$code $(ls -d many* 2> /dev/null)" = "2 " ]
srun --mpi=pmi2 -n 4 "$reshard" convert src many --to hf > run.log 2>&1
code=$?
if [ $code = 0 ]; then
  expect "srun --mpi=pmi2" run.log same many
else
  expect "srun --mpi=pmi2, which this MPI does not know: nothing is written" run.log [ ! -e many -a ! -e many.partial ]
fi

echo "== the end of a job's time"
# The job requeues itself: 143 means that a signal ended it, 6 that another rank died.
cat > go_on << 'EOF'
code=$?
echo "code $code"
if [ $code = 143 ] || [ $code = 6 ]; then
  [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ] && scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
EOF
cat > signal.sh << 'EOF'
#!/bin/bash
#SBATCH -N 2 -n 4 -t 1 --requeue --signal=TERM@50 --open-mode=append -o signal.log
srun --mpi=pmix ./hanging many ./reshard convert src many --to hf
. ./go_on
EOF
id=$(sbatch --parsable signal.sh)
wait_for 90 grep -q '^code' signal.log
expect "--signal=TERM: the ranks end with 143 and say how to go on" signal.log \
  eval 'grep -qx "code 143" signal.log && grep -q "rank .*interrupted.*the same command goes on" signal.log'
start_again "$id"
wait_for 240 job_is "$id" COMPLETED
expect "the job that is queued again goes on from there" signal.log \
  eval 'same many && [ "$(grep -c "resuming many.partial" signal.log)" = 1 ]'

cat > limit.sh << 'EOF'
#!/bin/bash
#SBATCH -N 1 -n 1 -t 1 --open-mode=append -o limit.log
srun ./hanging many ./reshard convert src many --to hf
EOF
id=$(sbatch --parsable limit.sh)
wait_for 150 job_is "$id" TIMEOUT
wait_for 20 grep -q 'the same command goes on' limit.log
expect "killed at its time limit, one process: nothing looks finished" limit.log [ -d many.partial -a ! -e many ]
srun -n 1 "$reshard" convert src many --to hf --resume require > run.log 2>&1
expect "the same command goes on" run.log same many

echo "== a node that goes down"
cat > node.sh << 'EOF'
#!/bin/bash
#SBATCH -N 2 -n 4 -t 5 --requeue --open-mode=append -o node.log
srun --mpi=pmix ./reshard convert src many --to hf --rank-timeout 5
. ./go_on
EOF
id=$(sbatch --parsable node.sh)
wait_for 60 recorded many && pull_the_plug n2
wait_for 60 grep -q '^code' node.log
expect "its plug is pulled: the other ranks end with 6 and say why" node.log \
  eval 'grep -qx "code 6" node.log && grep -q "did not respond.*the same command goes on" node.log && [ ! -e many ]'
start_again "$id"
wait_for 240 job_is "$id" COMPLETED
expect "the job goes on, on another node" node.log eval 'same many && grep -q "resuming many.partial" node.log'

start_node n2
wait_for 30 state_is n2 idle
true > node.log
sed -i 's/--rank-timeout 5//' node.sh
id=$(sbatch --parsable -w n1,n3 node.sh)
wait_for 60 recorded many && pull_the_plug n3 && scontrol update nodename=n3 state=down reason=unplugged
wait_for 30 eval 'scontrol show job $id | grep -q Restarts=1'
expect "scontrol says it is down: Slurm ends the job and queues it again" node.log [ ! -e many -a -d many.partial ]
start_again "$id" nodelist=
wait_for 240 job_is "$id" COMPLETED
expect "the job goes on, on another node" node.log eval 'same many && grep -q "resuming many.partial" node.log'

echo "== 512 MiB"
group=$3
if [ -d "$group" ]; then
  (
    echo $BASHPID > "$group/cgroup.procs"
    exec mpirun -n 2 --oversubscribe "$reshard" convert src many --to hf
  ) > run.log 2>&1 &
  wait_for 20 eval '[ "$(wc -l < "$group/cgroup.procs")" -ge 3 ]'  # mpirun and its ranks are in it
  within=$?
  wait $!
  expect "mpirun -n 2 in a control group of 512 MiB" run.log eval '[ $within = 0 ] && same many'
fi

echo "slurm: $passed passed, $failed failed"
[ $failed = 0 ]
