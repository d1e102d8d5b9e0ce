"""Units of systemd for a broker or a registry.

- ``Type=notify``: a unit is started when the broker serves; while it recovers it asks for more time (``metaq.server.notify``).
- Restarts are limited: a service that fails five times in five minutes will fail again. After a wrong setting (exit code 2)
  there is no second try.
- ``systemctl reload`` makes it read its settings and users again.
- It runs as a user of its own, may write only into its data folder, and has no privileges.
"""

from pathlib import Path
from typing import Final

ABSOLUTE_PATH: Final = r"/[\w./+-]+"
"""Paths that systemd, a shell and supervisor take literally, without quotes."""
STATE: Final = Path("/var/lib")
"""Folders in it are made by systemd, and belong to the unit's user."""
OPEN_FILES: Final = 65_536
"""max_connections is 10,000; max_open_files 512, of which a mapped one takes two; sockets of registries, slaves, ZooKeeper."""

UNIT: Final = """\
[Unit]
Description=metaq {kind}
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
Type=notify
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
User={user}
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2
# It asks for more than this while it recovers, or writes its last.
TimeoutStartSec=60
TimeoutStopSec=60
WatchdogSec=60
LimitNOFILE={files}
OOMScoreAdjust=-500
UMask=0027
{folder}

NoNewPrivileges=yes
CapabilityBoundingSet=
LockPersonality=yes
PrivateDevices=yes
PrivateTmp=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHome=read-only
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectSystem=strict
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native

[Install]
WantedBy=multi-user.target
"""


def unit(kind: str, command: str, user: str, data: Path) -> str:
    """Return the text of a unit. ``kind``: broker or registry; ``command``: with its absolute path; ``data``: absolute, too."""
    if data.is_relative_to(STATE) and data != STATE:
        folder = f"StateDirectory={data.relative_to(STATE)}\nStateDirectoryMode=0750"
    else:
        folder = f"ReadWritePaths={data}"
    return UNIT.format(kind=kind, command=command, user=user, files=OPEN_FILES, folder=folder)
