#!/usr/bin/env bash
# supervise.sh NODE GRACE: runs node-NODE.sh in a process group of its own, until it ends or standard input closes.
# Whoever started this holds that input open: when they are gone, or the connection is, the engine is stopped, too.
# A line "stop" asks for the same: SIGTERM to the group, and SIGKILL to what is left after GRACE seconds.
set -u

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
node=${1:?usage: supervise.sh NODE GRACE}
grace=${2:-30}

# A session of its own: a signal to the group reaches every worker and nothing else.
setsid "$here/node-$node.sh" < /dev/null &
engine=$!
# Until setsid has run there is no such group, and a signal to it would reach nobody.
while kill -0 "$engine" 2> /dev/null && ! kill -0 -- "-$engine" 2> /dev/null; do sleep 0.05; done

# Reads a word within $1 seconds into $heard. A word may come in two parts: read keeps a part when its time is over.
heard=
hear() {
  local part=
  read -r -t "$1" part
  local status=$?
  heard+=$part
  return "$status"
}

asked=
trap 'asked=1' TERM INT HUP
while [[ -z $asked ]] && kill -0 "$engine" 2> /dev/null; do
  # Closed when the status is 1 to 128; above, the time was over.
  hear 1 || (($? > 128)) || asked=1
  if [[ $heard == *stop* ]]; then asked=1; fi
done

# Also when the engine ended by itself: a worker that outlives it would hold its device.
kill -TERM -- "-$engine" 2> /dev/null
deadline=$((SECONDS + grace + 1)) # SECONDS counts whole ones: never less than the grace
while kill -0 -- "-$engine" 2> /dev/null && ((SECONDS < deadline)); do
  hear 0.2
  if [[ $heard == *kill* ]]; then break; fi
  sleep 0.1
done
kill -KILL -- "-$engine" 2> /dev/null
wait "$engine"
