"""A Kubernetes manifest for the same scripts: a ConfigMap, two Services and a StatefulSet of one pod a node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from k3dspark.deploy.options import Settled

_RESOURCES: Final = {"npu-a2": "huawei.com/Ascend910", "npu-a3": "huawei.com/Ascend910", "cuda": "nvidia.com/gpu"}
# What the driver gives a container on Ascend, beside the devices that the plugin mounts.
_DRIVER: Final = (
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/usr/local/Ascend/driver/lib64",
    "/usr/local/Ascend/driver/version.info",
    "/etc/ascend_install.info",
)
_IMAGES: Final = {
    "npu-a3": "quay.io/ascend/vllm-ascend:kimi-k3-a3",
    "npu-a2": "quay.io/ascend/vllm-ascend:kimi-k3",
    "cuda": "vllm/vllm-openai:kimi-k3",
}
NAME: Final = "k3dspark"


def manifest(settled: Settled, scripts: Mapping[str, str]) -> str:
    """The manifest's text; `scripts` are the files of the launch directory that pods run."""
    wish = settled.wish
    hosts = "".join(f"{NAME}-{node}.{NAME}-nodes\n" for node in range(wish.nodes)) if wish.nodes > 1 else "127.0.0.1\n"
    files = {"hosts": hosts, **{name: _open_to_the_cluster(text) for name, text in scripts.items()}}
    return "---\n".join([_config_map(settled, files), _services(settled), _stateful_set(settled)])


def _open_to_the_cluster(script: str) -> str:
    # On one machine the server listens on loopback; in a pod only the Service's address reaches it.
    return script.replace("--host 127.0.0.1", "--host 0.0.0.0")


def _config_map(settled: Settled, files: Mapping[str, str]) -> str:
    lines = [
        f"# {settled.engine.title} {settled.wish.version} with a DSpark draft. Written by `k3dspark plan`.",
        "#   kubectl apply -f kubernetes.yaml && kubectl rollout status statefulset/k3dspark --timeout=2h",
        "apiVersion: v1",
        "kind: ConfigMap",
        "metadata:",
        f"  name: {NAME}",
        f"  labels: {{app: {NAME}}}",
        "# The scripts of this directory; only the host names differ.",
        "data:",
    ]
    for name, text in files.items():
        lines.append(f"  {name}: |")
        lines += [f"    {line}" if line else "" for line in text.rstrip("\n").split("\n")]
    return "\n".join(lines) + "\n"


def _services(settled: Settled) -> str:
    port = settled.wish.port
    return f"""\
# Gives each pod a name that the others find it by, also before it is ready: they must meet to become ready.
apiVersion: v1
kind: Service
metadata:
  name: {NAME}-nodes
  labels: {{app: {NAME}}}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector: {{app: {NAME}}}
  ports:
    - {{name: http, port: {port}, targetPort: {port}}}
---
# What clients talk to: the head only, the other pods have no endpoint.
apiVersion: v1
kind: Service
metadata:
  name: {NAME}
  labels: {{app: {NAME}}}
spec:
  selector:
    app: {NAME}
    statefulset.kubernetes.io/pod-name: {NAME}-0
  ports:
    - {{name: http, port: {port}, targetPort: {port}}}
"""


def _stateful_set(settled: Settled) -> str:
    wish = settled.wish
    resource = _RESOURCES.get(wish.device)
    image = wish.image or _IMAGES.get(wish.device, "") or f"{wish.engine}:{wish.version}"
    mounts = {"draft": wish.draft, "target": wish.target} if wish.draft.startswith("/") else {"target": wish.target}
    mounts = {name: path for name, path in mounts.items() if path.startswith("/")}
    driver = {f"driver-{n}": path for n, path in enumerate(_DRIVER)} if settled.on_npu else {}
    lines = f"""\
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {NAME}
  labels: {{app: {NAME}}}
spec:
  serviceName: {NAME}-nodes
  replicas: {wish.nodes}
  # All at once: the nodes wait for each other.
  podManagementPolicy: Parallel
  # A pod is replaced by hand, when traffic is away: the group restarts as a whole.
  updateStrategy: {{type: OnDelete}}
  selector:
    matchLabels: {{app: {NAME}}}
  template:
    metadata:
      labels: {{app: {NAME}}}
      annotations:
        prometheus.io/scrape: "true"
        prometheus.io/port: "{wish.port}"
    spec:
      # Links between nodes go over the hosts' own network, past the overlay.
      hostNetwork: {"true" if wish.nodes > 1 else "false"}
      dnsPolicy: {"ClusterFirstWithHostNet" if wish.nodes > 1 else "ClusterFirst"}
      # The engine gets SIGTERM first and this long to end its workers.
      terminationGracePeriodSeconds: 120
      affinity:
        # One pod a machine: each takes all of its devices.
        podAntiAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            - labelSelector:
                matchLabels: {{app: {NAME}}}
              topologyKey: kubernetes.io/hostname
      containers:
        - name: engine
          # Pin a digest before production{"" if wish.image else ", of an image of your own"}.
          image: {json.dumps(image)}
          # The pod's number is the node's number.
          command: ["bash", "-c", "exec /plan/node-${{HOSTNAME##*-}}.sh"]
          env:
            # hostNetwork would make HOSTNAME the machine's name.
            - name: HOSTNAME
              valueFrom: {{fieldRef: {{fieldPath: metadata.name}}}}
          ports:
            - {{name: http, containerPort: {wish.port}}}
          # Loading takes up to two hours; until then nothing else is probed.
          startupProbe:
            exec: {{command: [/plan/health.sh]}}
            timeoutSeconds: 15
            periodSeconds: 10
            failureThreshold: 720
          readinessProbe:
            exec: {{command: [/plan/health.sh]}}
            timeoutSeconds: 15
            periodSeconds: 10
          # Five minutes without an answer: the group is stuck, all of it restarts.
          livenessProbe:
            exec: {{command: [/plan/health.sh]}}
            timeoutSeconds: 15
            periodSeconds: 30
            failureThreshold: 10
""".splitlines()
    if resource:
        lines += [
            "          resources:",
            "            # Whole devices; a limit on them is also the request.",
            f'            limits: {{"{resource}": {wish.devices}}}',
        ]
    if settled.on_npu or wish.device == "cuda":
        lines += [
            "          securityContext:",
            "            # Device memory is pinned for RDMA.",
            "            capabilities: {add: [IPC_LOCK]}",
        ]
    lines += ["          volumeMounts:", "            - {name: plan, mountPath: /plan, readOnly: true}"]
    lines += [
        "            # Workers pass tensors through shared memory; the default of 64 MiB ends in a bus error.",
        "            - {name: shm, mountPath: /dev/shm}",
    ]
    lines += [
        f"            - {{name: {name}, mountPath: {json.dumps(path)}, readOnly: true}}"
        for name, path in {**mounts, **driver}.items()
    ]
    lines += [
        "      volumes:",
        "        # 0555: the scripts are run, not changed.",
        "        - name: plan",
        f"          configMap: {{name: {NAME}, defaultMode: {0o555}}}",
        "        - name: shm",
        "          emptyDir: {medium: Memory, sizeLimit: 64Gi}",
    ]
    if mounts:
        lines.append("        # Checkpoints lie at the same path on every machine, or on a disk all of them mount.")
    for name, path in {**mounts, **driver}.items():
        lines += [f"        - name: {name}", f"          hostPath: {{path: {json.dumps(path)}}}"]
    return "\n".join(lines) + "\n"
