"""What looks after the processes of a host: systemd, or supervisor where there is none.

======================  =============================================  =================================================
                        systemd                                        supervisor
======================  =============================================  =================================================
who may deploy          root                                           any user
started after a boot    yes                                            when something starts ``supervisord``: cron's @reboot
a start that fails      5 times in 5 minutes, 5 s apart                5 times within 30 s each, 1 to 5 s apart
one that hangs          ended by the watchdog                          not noticed
its log                 the journal                                    FOLDER/log/KIND.log, 4 files of 50 MB
======================  =============================================  =================================================
"""

import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from metaq.deploy.cluster import COMMANDS, Service
from metaq.deploy.machine import Machine
from metaq.deploy.unit import OPEN_FILES, unit

RUNNING: Final = "running"
STARTING: Final = "starting"
STOPPED: Final = "stopped"
FAILED: Final = "failed"

UNITS: Final = "/etc/systemd/system"

SUPERVISORD: Final = """\
[supervisord]
logfile={home}/supervisord.log
logfile_maxbytes=10MB
logfile_backups=1
pidfile={home}/supervisord.pid
minfds={files}
umask=027

[unix_http_server]
file={home}/socket
chmod=0700

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface

[supervisorctl]
serverurl=unix://{home}/socket
"""
# supervisorctl would wait for startsecs
START: Final = """\
import supervisor.xmlrpc, xmlrpc.client
transport = supervisor.xmlrpc.SupervisorTransport(None, None, "unix://{home}/socket")
try:
    xmlrpc.client.ServerProxy("http://localhost", transport).supervisor.startProcess("{kind}", False)
except xmlrpc.client.Fault as fault:
    if fault.faultCode != supervisor.xmlrpc.Faults.ALREADY_STARTED:
        raise
"""
PROGRAM: Final = """
[program:{kind}]
command={command}
{user}autorestart=unexpected
exitcodes=0,2
startsecs=30
startretries=5
stopwaitsecs=60
redirect_stderr=true
stdout_logfile={folder}/log/{kind}.log
stdout_logfile_maxbytes=50MB
stdout_logfile_backups=3
"""


def command_line(folder: str, kind: str) -> str:
    """What runs: of whichever release is the current one."""
    return f"{folder}/current/venv/bin/metaq {COMMANDS[kind]} --config {folder}/current/conf/{kind}.yaml"


class Processes(Protocol):
    """The services of one host."""

    def install(self, services: Iterable[Service]) -> None:
        """Make them known; nothing that runs is touched."""
        ...

    def start(self, kind: str) -> None:
        """Start one that does not run, without waiting until it serves."""
        ...

    def stop(self, kind: str) -> None:
        """Stop it in order; returns when it has ended, at once when it does not run."""
        ...

    def state(self, kind: str) -> str:
        """``running``, ``starting``, ``stopped`` or ``failed``."""
        ...

    def log(self, kind: str, lines: int) -> str:
        """The end of what it has written to standard error."""
        ...


class Systemd:
    """A unit ``metaq-KIND`` for each service."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def install(self, services: Iterable[Service]) -> None:
        machine = self._machine
        for service in services:
            line = command_line(machine.folder, service.kind)
            text = unit(service.kind, line, machine.host.settings.user or "root", service.settings.data)
            machine.run(f"printf %s {shlex.quote(text)} > {UNITS}/metaq-{service.kind}.service", what="writing the unit")
        machine.run("systemctl daemon-reload")
        machine.run("systemctl enable --quiet " + " ".join(f"metaq-{service.kind}" for service in services))

    def start(self, kind: str) -> None:
        self._machine.run(f"systemctl reset-failed metaq-{kind}; systemctl start --no-block metaq-{kind}", what=f"start {kind}")

    def stop(self, kind: str) -> None:
        if self.state(kind) in (RUNNING, STARTING):
            self._machine.run(f"systemctl stop metaq-{kind}", what=f"stop {kind}")

    def state(self, kind: str) -> str:
        said = self._machine.attempt(f"systemctl is-active metaq-{kind}")[1].strip()
        return {"active": RUNNING, "activating": STARTING, "deactivating": STARTING, "failed": FAILED}.get(said, STOPPED)

    def log(self, kind: str, lines: int) -> str:
        return self._machine.run(f"journalctl --no-pager -u metaq-{kind} -n {lines} -o cat", what="reading the journal")


class Supervisor:
    """One supervisord in FOLDER/supervisor, with an environment of its own: it outlives every release."""

    def __init__(self, machine: Machine, open_files: int) -> None:
        self._machine = machine
        self._home = f"{machine.folder}/supervisor"
        self._control = f"{self._home}/venv/bin/supervisorctl -c {self._home}/supervisord.conf"
        self._files = min(OPEN_FILES, open_files)

    def install(self, services: Iterable[Service]) -> None:
        machine, home = self._machine, self._home
        user = f"user={machine.host.settings.user}\n" if machine.host.settings.user else ""
        text = SUPERVISORD.format(home=home, files=self._files)
        for service in services:
            line = command_line(machine.folder, service.kind)
            text += PROGRAM.format(kind=service.kind, command=line, folder=machine.folder, user=user)
        # What has not changed it leaves alone; each program's command is the same in every release.
        machine.run(
            f"printf %s {shlex.quote(text)} > {home}/supervisord.conf && mkdir -p {machine.folder}/log && "
            f"if {self._control} pid >/dev/null 2>&1; then {self._control} update; fi",
            what="configuring supervisor",
        )

    def start(self, kind: str) -> None:
        control, home = self._control, self._home
        start = shlex.quote(START.format(home=home, kind=kind))
        # supervisord starts everything that it knows when it is started itself, and what is new when it hears of it
        self._machine.run(
            f"if {control} pid >/dev/null 2>&1; then {home}/venv/bin/python -c {start}; "
            f"else {home}/venv/bin/supervisord -c {home}/supervisord.conf; fi",
            what=f"start {kind}",
        )

    def stop(self, kind: str) -> None:
        if self.state(kind) in (RUNNING, STARTING):
            self._machine.run(f"{self._control} stop {kind}", what=f"stop {kind}")

    def state(self, kind: str) -> str:
        output = self._machine.attempt(f"{self._control} status {kind}")[1].split()
        said = output[1] if len(output) > 1 else ""
        states = {"RUNNING": RUNNING, "STARTING": STARTING, "BACKOFF": STARTING, "STOPPING": STARTING, "FATAL": FAILED}
        return FAILED if said == "EXITED" else states.get(said, STOPPED)

    def log(self, kind: str, lines: int) -> str:
        return self._machine.run(f"tail -n {lines} {self._machine.folder}/log/{kind}.log", what="reading the log")


def processes_of(machine: Machine, facts: Mapping[str, Any]) -> Processes:
    """Those that the host's settings choose; ``DeployFailed`` when it has not got them."""
    wanted = machine.host.settings.processes
    able = facts["systemd"] and facts["root"]
    if wanted == "systemd" and not able:
        reason = "is not the init of this machine" if not facts["systemd"] else "needs ssh_user root"
        raise machine.fail(f"systemd {reason}; set processes to supervisor")
    if wanted == "supervisor" or not able:
        return Supervisor(machine, facts["open_files"])
    return Systemd(machine)
