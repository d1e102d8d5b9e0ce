"""The process manager of a host: systemd, or supervisor where there is none.

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

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from metaq.deploy.cluster import COMMANDS, Kind, Service, normal_folder
from metaq.deploy.machine import Machine
from metaq.deploy.unit import OPEN_FILES, unit

RUNNING: Final = "running"
STARTING: Final = "starting"
STOPPING: Final = "stopping"
RESTARTING: Final = "restarting"
"""It has ended, and is started again after a pause."""
STOPPED: Final = "stopped"
FAILED: Final = "failed"
DOWN: Final = (RESTARTING, STOPPED, FAILED)
"""States without a process that could serve."""

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
CALL: Final = """\
import supervisor.xmlrpc, xmlrpc.client
transport = supervisor.xmlrpc.SupervisorTransport(None, None, "unix://{home}/socket")
server = xmlrpc.client.ServerProxy("http://localhost", transport).supervisor
try:
    {call}
except (ConnectionRefusedError, FileNotFoundError):
    print("no supervisord")
except xmlrpc.client.Fault as fault:
    if fault.faultCode != supervisor.xmlrpc.Faults.{expected}:
        raise
    print("{expected}")
"""
# not by supervisorctl, which would wait for startsecs, and shows no process id while it counts as starting
START: Final = 'server.startProcess("{kind}", False)'
LOOK: Final = 'print("{{statename}} {{pid}}".format(**server.getProcessInfo("{kind}")))'
RETIRE: Final = 'server.stopProcessGroup("{kind}"); server.removeProcessGroup("{kind}")'
PROGRAM_STATES: Final = {
    "RUNNING": RUNNING,
    "STARTING": STARTING,
    "STOPPING": STOPPING,
    "BACKOFF": RESTARTING,
    "STOPPED": STOPPED,
    "EXITED": FAILED,
    "FATAL": FAILED,
}
ACTIVE_STATES: Final = {
    "active": RUNNING,
    "reloading": RUNNING,
    "activating": STARTING,
    "deactivating": STOPPING,
    "inactive": STOPPED,
    "failed": FAILED,
}
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


def _others(services: Sequence[Service]) -> list[Kind]:
    """Return the kinds that a host does not run."""
    return [kind for kind in COMMANDS if all(service.kind != kind for service in services)]


def command_line(folder: str, kind: Kind) -> str:
    """Return the command of a service, which runs whichever release is current."""
    return f"{folder}/current/venv/bin/metaq {COMMANDS[kind]} --config {folder}/current/conf/{kind}.yaml"


def _file(kind: Kind) -> str:
    """Return the path of a kind's unit."""
    return f"{UNITS}/metaq-{kind}.service"


class ServiceState(NamedTuple):
    """The state of a service according to its manager."""

    state: str
    """``running``, ``starting``, ``stopping``, ``restarting``, ``stopped`` or ``failed``."""
    pid: int
    """Its process id; 0 without a process."""


class Processes(Protocol):
    """The services of one host, as its manager sees them."""

    def install(self, services: Sequence[Service]) -> None:
        """Configure the services; stop and forget those that are no longer among them. No other process is touched."""
        ...

    def start(self, kind: Kind) -> None:
        """Start a service, unless it has been started already. Do not wait until it serves."""
        ...

    def stop(self, kind: Kind) -> None:
        """Stop a service in order, and do not restart it. Return when it has ended; at once when it does not run."""
        ...

    def look(self, kind: Kind) -> ServiceState:
        """Return its state now."""
        ...

    def log(self, kind: Kind, lines: int) -> str:
        """Return the last lines of its log."""
        ...


class Systemd:
    """A unit ``metaq-KIND`` for each service. One of that name may belong to another installation, in another folder."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def install(self, services: Sequence[Service]) -> None:
        machine = self._machine
        for service in services:
            self._refuse_other(service.kind)
        for kind in _others(services):
            if self._folder_of(kind) == machine.folder:
                forget = f"systemctl disable --now --quiet metaq-{kind} && rm {_file(kind)}"
                machine.run(forget, what=f"forgetting the {kind}")
        for service in services:
            line = command_line(machine.folder, service.kind)
            text = unit(service.kind, line, machine.host.settings.user or "root", service.settings.data)
            machine.run(f"printf %s {shlex.quote(text)} > {_file(service.kind)}", what="writing the unit")
        machine.run("systemctl daemon-reload")
        machine.run("systemctl enable --quiet " + " ".join(f"metaq-{service.kind}" for service in services))

    def start(self, kind: Kind) -> None:
        self._machine.run(f"systemctl reset-failed metaq-{kind}; systemctl start --no-block metaq-{kind}", what=f"start {kind}")

    def stop(self, kind: Kind) -> None:
        self._refuse_other(kind)
        if self.look(kind).state not in (STOPPED, FAILED):
            self._machine.run(f"systemctl stop metaq-{kind}", what=f"stop {kind}")

    def look(self, kind: Kind) -> ServiceState:
        asked = f"systemctl show -p ActiveState -p SubState -p MainPID metaq-{kind}"
        said = dict(line.split("=", 1) for line in self._machine.run(asked, what="asking systemd").splitlines())
        active = said["ActiveState"]
        if active not in ACTIVE_STATES:
            raise self._machine.fail(f"metaq-{kind} is {active}, says systemd")
        restarting = active == "activating" and said["SubState"].startswith("auto-restart")
        return ServiceState(RESTARTING if restarting else ACTIVE_STATES[active], int(said["MainPID"]))

    def log(self, kind: Kind, lines: int) -> str:
        return self._machine.run(f"journalctl --no-pager -u metaq-{kind} -n {lines} -o cat", what="reading the journal")

    def _refuse_other(self, kind: Kind) -> None:
        """Raise ``DeployFailed`` when there is a unit, and it is of another folder."""
        file, folder = _file(kind), self._machine.folder
        if self._folder_of(kind) not in (None, folder):
            reason = f"{file} is the unit of another installation, not of {folder}"
            raise self._machine.fail(f"{reason}; set processes to supervisor, or disable that service and remove the file")

    def _folder_of(self, kind: Kind) -> str | None:
        """Return the folder whose current release the unit runs; empty when it runs none, ``None`` without a unit."""
        file = _file(kind)
        text = self._machine.run(f"if [ -e {file} ]; then cat {file}; fi", what="reading the unit")
        if not text:
            return None
        found = re.search(r"^ExecStart=(.+?)/current/", text, re.MULTILINE)
        return normal_folder(found[1]) if found else ""


class Supervisor:
    """One supervisord in FOLDER/supervisor, in an environment of its own, as it outlives every release."""

    def __init__(self, machine: Machine, open_files: int) -> None:
        self._machine = machine
        self._home = f"{machine.folder}/supervisor"
        self._control = f"{self._home}/venv/bin/supervisorctl -c {self._home}/supervisord.conf"
        self._files = min(OPEN_FILES, open_files)

    def install(self, services: Sequence[Service]) -> None:
        machine, home = self._machine, self._home
        user = f"user={machine.host.settings.user}\n" if machine.host.settings.user else ""
        text = SUPERVISORD.format(home=home, files=self._files)
        for service in services:
            line = command_line(machine.folder, service.kind)
            text += PROGRAM.format(kind=service.kind, command=line, folder=machine.folder, user=user)
        # supervisord reads it when a program is started: an update of a running program would restart it
        machine.run(
            f"printf %s {shlex.quote(text)} > {home}/supervisord.conf && mkdir -p {machine.folder}/log",
            what="configuring supervisor",
        )
        for kind in _others(services):
            machine.run(self._call(RETIRE, kind, "BAD_NAME"), what=f"forgetting the {kind}")

    def start(self, kind: Kind) -> None:
        control, home = self._control, self._home
        # supervisord starts all its programs when it starts itself, and a new program at its update
        self._machine.run(
            f"if {control} pid >/dev/null 2>&1; then {control} update {kind} && {self._call(START, kind, 'ALREADY_STARTED')}; "
            f"else {home}/venv/bin/supervisord -c {home}/supervisord.conf; fi",
            what=f"start {kind}",
        )

    def stop(self, kind: Kind) -> None:
        if self.look(kind).state not in (STOPPED, FAILED):
            self._machine.run(f"{self._control} stop {kind}", what=f"stop {kind}")

    def look(self, kind: Kind) -> ServiceState:
        # before the first release there is no supervisor
        asked = f"if [ -e {self._home}/complete ]; then {self._call(LOOK, kind, 'BAD_NAME')}; fi"
        said = self._machine.run(asked, what="asking supervisor").split()
        if said[:1] in ([], ["no"], ["BAD_NAME"]):
            return ServiceState(STOPPED, 0)
        if said[0] not in PROGRAM_STATES:
            raise self._machine.fail(f"{kind} is {said[0]}, says supervisor")
        return ServiceState(PROGRAM_STATES[said[0]], int(said[1]))

    def _call(self, call: str, kind: Kind, expected: str) -> str:
        """Return a command that calls supervisord; a fault with the name ``expected`` is no failure."""
        script = CALL.format(home=self._home, call=call.format(kind=kind), expected=expected)
        return f"{self._home}/venv/bin/python -c {shlex.quote(script)}"

    def log(self, kind: Kind, lines: int) -> str:
        return self._machine.run(f"tail -n {lines} {self._machine.folder}/log/{kind}.log", what="reading the log")


def processes_of(machine: Machine, facts: Mapping[str, Any]) -> Processes:
    """Return the manager that the host's settings choose; ``DeployFailed`` when the host lacks it."""
    wanted = machine.host.settings.processes
    able = facts["systemd"] and facts["root"]
    if wanted == "systemd" and not able:
        reason = "is not the init of this machine" if not facts["systemd"] else "needs ssh_user root"
        raise machine.fail(f"systemd {reason}; set processes to supervisor")
    if wanted == "supervisor" or not able:
        return Supervisor(machine, facts["open_files"])
    return Systemd(machine)
