#!/bin/bash
# Runs a command next to OpenStack Swift, which speaks S3's protocol and checks every signature:
#
#   tests/storage/swift.sh COMMAND ...
#
# The command gets the endpoint and the key in AWS_* variables, and an empty bucket named "bucket". The servers and
# their files are gone when it has ended. Exit code 77: Debian's packages (samples/setup.sh soak) are not installed.
set -u -o pipefail
export PATH=$PATH:/usr/sbin:/usr/bin

command -v swift-proxy-server swift-object-server swift-ring-builder memcached > /dev/null ||
  { echo "swift: skipped: needs swift-proxy, swift-account, swift-container, swift-object and memcached" >&2; exit 77; }
work=$(mktemp -d) || exit 1
servers=()
clean_up() {
  [ ${#servers[@]} -eq 0 ] || kill -KILL "${servers[@]}" 2> /dev/null
  wait 2> /dev/null
  rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 1' HUP INT TERM

read -r proxy account container object cache < <(python3 -c '
import socket
sockets = [socket.socket() for _ in range(5)]
for s in sockets:
    s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in sockets))')

# Configures a server. Reads the pipeline and what follows it.
configure() {  # NAME PORT
  cat > "$work/$1.conf" << END
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = $2
user = $(id -un)
swift_dir = $work
devices = $work/devices
mount_check = false
disable_fallocate = true
workers = 0
log_address = /nonexistent
$(cat)
END
}

mkdir -p "$work/devices/disk"
printf '[swift-hash]\nswift_hash_path_suffix = a\nswift_hash_path_prefix = b\n[storage-policy:0]\nname = one\ndefault = yes\n' > "$work/swift.conf"
for server in account container object; do
  configure $server "${!server}" <<< "[pipeline:main]
pipeline = $server-server
[app:$server-server]
use = egg:swift#$server"
  ring=$work/$server.builder
  { swift-ring-builder "$ring" create 4 1 0 && swift-ring-builder "$ring" add "r1z1-127.0.0.1:${!server}/disk" 1 &&
    swift-ring-builder "$ring" rebalance; } > "$work/ring.log" || { cat "$work/ring.log" >&2; exit 1; }
done
filter() { printf '[filter:%s]\nuse = egg:swift#%s\n' "$1" "$1"; }
configure proxy "$proxy" << END
[pipeline:main]
pipeline = catch_errors cache listing_formats bulk s3api tempauth slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
# A busy machine must not look like a dead server.
conn_timeout = 20
node_timeout = 60
recoverable_node_timeout = 60
$(for name in catch_errors listing_formats bulk slo dlo; do filter $name; done)
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:$cache
$(filter tempauth)
user_test_tester = testing .admin
$(filter s3api)
location = us-east-1
s3_acl = false
check_bucket_owner = false
END

as_nobody=()
[ "$(id -u)" != 0 ] || as_nobody=(-u nobody)
memcached "${as_nobody[@]}" -l 127.0.0.1 -p "$cache" &
servers+=($!)
for server in account container object proxy; do
  "swift-$server-server" "$work/$server.conf" > "$work/$server.log" 2>&1 &
  servers+=($!)
done

# Fails if a server does not listen after a minute.
wait_for() {  # PORT
  local i
  for ((i = 0; i < 600; i++)); do
    (: < "/dev/tcp/127.0.0.1/$1") 2> /dev/null && return
    sleep 0.1
  done
  tail -n 5 "$work"/*.log >&2
  return 1
}
for port in "$account" "$container" "$object" "$proxy"; do wait_for "$port" || exit 1; done

export AWS_ENDPOINT_URL_S3=http://127.0.0.1:$proxy AWS_ACCESS_KEY_ID=test:tester AWS_SECRET_ACCESS_KEY=testing
export AWS_REGION=us-east-1 AWS_EC2_METADATA_DISABLED=true
answer=$(curl -s -D - -o "$work/answer" -H "X-Storage-User: $AWS_ACCESS_KEY_ID" \
  -H "X-Storage-Pass: $AWS_SECRET_ACCESS_KEY" "$AWS_ENDPOINT_URL_S3/auth/v1.0" | tr -d '\r')
curl -s -f -o "$work/answer" -X PUT -H "X-Auth-Token: $(sed -n 's/^X-Auth-Token: //Ip' <<< "$answer")" \
  "$(sed -n 's/^X-Storage-Url: //Ip' <<< "$answer")/bucket" || { tail -n 5 "$work"/*.log >&2; exit 1; }
"$@"
