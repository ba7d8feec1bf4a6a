"""A systemd template unit: `systemctl start k3dspark@2` runs node 2's script and returns when it is healthy."""

from __future__ import annotations

from k3dspark.deploy.options import Settled

UNIT_NAME = "k3dspark@.service"

_UNIT = """\
# {title} {version} with a DSpark draft; the instance is the node's number. Written by `k3dspark plan`.
#   cp {name} /etc/systemd/system/ && systemctl daemon-reload && systemctl enable --now k3dspark@NODE
[Unit]
Description={title} node %i with its DSpark draft
# Rendezvous between nodes needs addresses, not only a link.
Wants=network-online.target
After=network-online.target
# A node that fails at once, for the same reason each time, is left alone for a person to read its log.
StartLimitIntervalSec=1h
StartLimitBurst=5

[Service]
# The script becomes the engine, which does not tell systemd when it is ready: the health check does.
Type=exec
{user}ExecStart={home}/node-%i.sh
ExecStartPost={home}/health.sh wait 7000
# Loading Kimi K3 takes up to two hours from a shared disk.
TimeoutStartSec=7200
# The engine ends its workers on SIGTERM; whatever is left after the grace is killed with it.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec=120
# A replica that lost a node cannot go on: the whole group starts again.
Restart=on-failure
RestartSec=30
# Device memory is pinned for RDMA.
LimitMEMLOCK=infinity
# Each worker holds hundreds of sockets and files.
LimitNOFILE=1048576
TasksMax=infinity
# Under memory pressure other services go first: reloading costs an hour.
OOMScoreAdjust=-500

[Install]
WantedBy=multi-user.target
"""


def unit(settled: Settled) -> str:
    """The unit's text; `home` is where the launch directory lies on each node."""
    wish = settled.wish
    user = (
        "# Not root: only the devices' group is needed.\nUser=" + wish.user.replace("%", "%%") + "\n"
        if wish.user
        else ""
    )
    return _UNIT.format(
        title=settled.engine.title, version=wish.version, name=UNIT_NAME, user=user, home=_path(wish.home)
    )


def _path(path: str) -> str:
    """A path in a unit: % starts a specifier, a blank ends a word."""
    return path.replace("%", "%%").replace("\\", "\\\\").replace(" ", "\\x20")
