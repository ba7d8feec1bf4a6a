"""Shell of a launch directory: one script a node, and health.sh."""

from __future__ import annotations

import json
import shlex

from k3dspark.deploy.lines import array, comment, exports
from k3dspark.deploy.options import Settled
from k3dspark.deploy.sglang_command import sglang_command, sglang_environment, sglang_options
from k3dspark.deploy.vllm_command import vllm_command, vllm_environment, vllm_options

_PREAMBLE = """\
#!/usr/bin/env bash
# Node {node} of {nodes}: {title} {version} serves {name} with its DSpark draft. Written by `k3dspark plan`;
# run by `k3dspark launch`, the systemd unit and the Kubernetes manifest beside it. Change the plan, not this file.
set -euo pipefail

# This directory, wherever it was copied to.
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
# Hosts of all nodes, one a line; the first is the head.
mapfile -t hosts < "$here/hosts"
"""

_ADDRESS = """\
# This node's address. One that is only valid on this machine would make the others wait for it until they time out.
local_ip=$(getent ahostsv4 "${{hosts[{node}]}}" | awk 'NR == 1 {{ print $1 }}')
case $local_ip in
  "") echo "k3dspark: cannot resolve ${{hosts[{node}]}}: correct $here/hosts" >&2; exit 65 ;;
  127.*) echo "k3dspark: ${{hosts[{node}]}} is $local_ip here: name its address between nodes" >&2; exit 65 ;;
esac
"""

_FIND_INTERFACE = """\
# The interface that owns this address.
interface=$(ip -o -4 addr show | awk -v ip="$local_ip" 'index($4, ip "/") == 1 { print $2; exit }')
if [[ -z $interface ]]; then
  echo "k3dspark: no interface of this machine has $local_ip: start this script on its own node" >&2
  exit 65
fi
"""

_WEIGHTS = """\
# A Git LFS pointer in place of weights is some 130 bytes; the engine would only say so minutes later.
for file in "$draft"/config.json "$draft"/*.safetensors; do
  if [[ ! -s $file ]]; then
    echo "k3dspark: $file is missing: fetch the draft again (k3dspark fetch)" >&2
    exit 66
  fi
  case $file in *.safetensors)
    if [[ $(head -c 42 -- "$file" | tr -d '\\0') == "version https://git-lfs.github.com/spec/v1"* ]]; then
      echo "k3dspark: $file is a Git LFS pointer, not weights: run git lfs pull in $draft" >&2
      exit 66
    fi ;;
  esac
done
"""

_ASCEND = """\
# CANN's libraries and operators; its scripts read variables that may be unset.
set +u
for script in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do
  if [[ -r $script ]]; then
    # shellcheck source=/dev/null
    source "$script"
  fi
done
set -u
"""

_PLUGIN = """\
# Stock vLLM has no K3 draft on CPU, and Triton no CPU: the k3dspark plugin brings both, the latter in a folder.
if ! interpreter=$({python} -m k3dspark.vllm_plugin); then
  echo "k3dspark: install k3-dspark beside vLLM, for its plugin (scripts/vllm-cpu-env.sh does it)" >&2
  exit 66
fi
"""


def node_script(settled: Settled, node: int) -> str:
    """The script of one node."""
    wish = settled.wish
    vllm = settled.engine.name != "sglang"
    environment = (vllm_environment if vllm else sglang_environment)(settled, node)
    options = (vllm_options if vllm else sglang_options)(settled, node)
    parts = [
        _PREAMBLE.format(
            node=node, nodes=wish.nodes, title=settled.engine.title, version=wish.version, name=wish.served_name
        )
    ]
    if wish.nodes > 1:
        parts.append(_ADDRESS.format(node=node))
        parts.append(
            "\n".join([*comment("The network between the nodes."), f"interface={shlex.quote(wish.interface)}", ""])
            if wish.interface
            else _FIND_INTERFACE
        )
    parts.append(f"draft={shlex.quote(wish.draft)}\n" + _WEIGHTS)
    if settled.on_npu:
        parts.append(_ASCEND)
    if wish.device == "cpu":
        parts.append(_PLUGIN.format(python=shlex.quote(wish.python)))
    parts.append(
        "\n".join(
            [
                *exports(environment),
                *comment("A proxy between the nodes would swallow health checks and rendezvous."),
                'no_proxy="${no_proxy:+$no_proxy,}localhost,127.0.0.1,$(IFS=,; echo "${hosts[*]}")"',
                'export no_proxy NO_PROXY="$no_proxy"',
                "",
            ]
        )
    )
    parts.append("\n".join([*array("command", (vllm_command if vllm else sglang_command)(settled)), ""]))
    parts.append("\n".join([*array("options", options), ""]))
    parts.append(
        "\n".join(
            [
                *comment("The engine takes this process' place, so that a signal to it reaches the engine."),
                'exec "${command[@]}" "${options[@]}"',
                "",
            ]
        )
    )
    return "\n".join(parts)


_HEALTH = """\
#!/usr/bin/env bash
# Is the server there, does it serve the model, and does it really speculate? Written by `k3dspark plan`.
#   health.sh [check]        status 0 when it answers and serves {name}
#   health.sh wait SECONDS   the same, asked every 5 seconds until then
#   health.sh speculative    sends one request and reads the engine's own counters
set -euo pipefail

here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
mapfile -t hosts < "$here/hosts"
# The head answers for the whole cluster.
url="http://${{hosts[0]}}:{port}"
# No proxy stands between the nodes, and a hanging server must not hang this.
ask=(curl --fail --silent --show-error --noproxy '*' --max-time 10)

check() {{
  "${{ask[@]}}" --output /dev/null "$url/health"
  # A server of something else on this port would pass the line above.
  "${{ask[@]}}" "$url/v1/models" | grep --quiet --fixed-strings {quoted}
}}

drafted() {{
  # Counters, summed over replicas; gauges where the engine has no counter.
  "${{ask[@]}}" "$url/metrics" | awk '/^{metric}/ {{ sum += $NF }} END {{ print sum + 0 }}'
}}

case ${{1:-check}} in
  check) check ;;
  wait)
    deadline=$((SECONDS + ${{2:-7200}}))
    until check 2> /dev/null; do
      if ((SECONDS >= deadline)); then
        echo "k3dspark: $url is not healthy after ${{2:-7200}} seconds" >&2
        exit 1
      fi
      sleep 5
    done ;;
  speculative)
    "${{ask[@]}}" --max-time 300 --output /dev/null --header 'Content-Type: application/json' \\
      --data {request} "$url/v1/completions"
    if [[ $(drafted) == 0 ]]; then
      echo "k3dspark: the engine drafted nothing: speculation is off, or its metrics are" >&2
      exit 1
    fi
    echo "speculative" ;;
  *) echo "usage: health.sh [check | wait SECONDS | speculative]" >&2; exit 64 ;;
esac
"""


def health_script(settled: Settled) -> str:
    """health.sh: asked by systemd, Kubernetes, `k3dspark launch` and people."""
    wish = settled.wish
    body = {"model": wish.served_name, "prompt": "1, 2, 3, 4, 5,", "max_tokens": 32, "temperature": 0}
    sglang = settled.engine.name == "sglang"
    metric = "sglang:spec_accept_length" if sglang else "vllm:spec_decode_num_draft_tokens_total"
    return _HEALTH.format(
        name=wish.served_name,
        port=wish.port,
        quoted=shlex.quote(json.dumps(wish.served_name)),
        metric=metric,
        request=shlex.quote(json.dumps(body)),
    )
