"""Packaging of the distribution `metaq-broker`, whose import name is `metaq`."""

import os
import re
import sys
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup

HERE = Path(__file__).parent
README = HERE / "README.md"

# Where the source is published. A release from another repository is refused (.github/workflows/release.yml).
REPOSITORY = "https://github.com/metaq-broker/metaq"

# Read, not imported: the build environment has none of the dependencies.
VERSION = re.findall(r'^__version__ = "(.+)"$', (HERE / "metaq" / "__init__.py").read_text("utf-8"), re.MULTILINE)[0]
TREE = f"{REPOSITORY}/blob/v{VERSION}"

# The linters change their rules between releases, so these two are held to one series; `make lint` stays reproducible.
LINTERS = ["mypy~=2.4.0", "ruff~=0.17.0"]

# What metaq.client.datamanager works with.
TRANSACTION = ["transaction>=4.0", "zope.interface>=5.0"]

# What metaq.registry.zookeeper works with.
ZOOKEEPER = ["kazoo>=2.10"]

# What metaq.store.ordered.rocksdb works with. It comes as wheels only; without it there is metaq.store.ordered.sqlite.
TIMERS = ["rocksdict>=0.3.29; python_version < '3.15' and platform_machine in 'x86_64 aarch64'"]

# Spark, and what it needs to read from Python; its jars also hold the ZooKeeper that `metaq zookeeper` starts.
SPARK = ["numpy>=1.24", "pyarrow>=18", "pyspark>=4.0"]

# Bodies that RocketMQ 5 clients have compressed by LZ4 or Zstandard.
COMPRESSION = ["lz4>=4.3", "zstandard>=0.22"]

# What fabfile.py works with.
DEPLOY = ["fabric>=3.2"]

# Pictures beside the page of `metaq offsets report`.
REPORT = ["matplotlib>=3.9"]

# What the tests of integrations/opentelemetry work with: the SDK, the command that instruments programs, and other frameworks.
OPENTELEMETRY = [
    "opentelemetry-distro>=0.51b0",
    "opentelemetry-instrumentation-celery>=0.51b0",
    "opentelemetry-instrumentation-fastapi>=0.51b0",
    "opentelemetry-sdk>=1.30",
]

# `make docs`: decision 19. mkdocs 2 will not know its plugins.
SITE = ["mkdocs>=1.6,<2", "mkdocs-material>=9.7,<10"]

# Celery on integrations/kombu, and Redis, which keeps the tests' results and is what rates are compared with.
CELERY = ["celery>=5.5", "redis>=5.0"]

# What docs/recipes.md works with.
RECIPES = ["django>=5.2", "fastapi>=0.115", "gunicorn>=23.0", "httpx2>=2.0"]

# What the packages in integrations work with.
INTEGRATIONS = ["dramatiq>=2.2,<3", "taskiq>=0.13,<0.14"]

# The way of a put and of a get. mypyc makes extension modules of the same sources; without them all works the same, slower.
COMPILED = [
    "metaq/dedupe/filter.py",
    "metaq/dedupe/records.py",
    "metaq/dedupe/seen.py",
    "metaq/engine/dedupe/asking.py",
    "metaq/engine/dedupe/dedupe.py",
    "metaq/engine/dedupe/index.py",
    "metaq/engine/leases/attempts.py",
    "metaq/engine/leases/clocks.py",
    "metaq/engine/leases/counting.py",
    "metaq/engine/leases/keyed.py",
    "metaq/engine/leases/leaselog.py",
    "metaq/engine/leases/leases.py",
    "metaq/engine/leases/planning.py",
    "metaq/engine/leases/popping.py",
    "metaq/engine/leases/waiting.py",
    "metaq/engine/placing.py",
    "metaq/engine/reading/collecting.py",
    "metaq/engine/tables/offsets.py",
    "metaq/engine/timers/copying.py",
    "metaq/engine/timers/delivery.py",
    "metaq/engine/timers/staged.py",
    "metaq/engine/timers/table.py",
    "metaq/engine/timers/timers.py",
    "metaq/engine/turn.py",
    "metaq/leases/bunch.py",
    "metaq/leases/events.py",
    "metaq/leases/redelivered.py",
    "metaq/leases/state.py",
    "metaq/leases/tokens.py",
    "metaq/protocol/delays.py",
    "metaq/protocol/ids.py",
    "metaq/protocol/keys.py",
    "metaq/protocol/properties.py",
    "metaq/protocol/record.py",
    "metaq/protocol/remoting/fastjson.py",
    "metaq/protocol/remoting/frames.py",
    "metaq/protocol/remoting/leases/acks.py",
    "metaq/protocol/remoting/leases/described.py",
    "metaq/protocol/remoting/leases/plainacks.py",
    "metaq/protocol/remoting/leases/receipts.py",
    "metaq/protocol/remoting/recall.py",
    "metaq/protocol/remoting/requests.py",
    "metaq/protocol/remoting/sending/batch.py",
    "metaq/protocol/remoting/sending/plain.py",
    "metaq/protocol/text/codec.py",
    "metaq/protocol/text/commands.py",
    "metaq/protocol/text/ids.py",
    "metaq/protocol/text/leaselines.py",
    "metaq/protocol/text/lines.py",
    "metaq/protocol/text/messages.py",
    "metaq/protocol/text/pushed.py",
    "metaq/protocol/text/tokens.py",
    "metaq/protocol/text/writing.py",
    "metaq/server/access/permissions.py",
    "metaq/server/api/publishing.py",
    "metaq/server/endpoint.py",
    "metaq/server/http/session.py",
    "metaq/server/remoting/consuming/acks.py",
    "metaq/server/remoting/consuming/pop.py",
    "metaq/server/remoting/consuming/popanswers.py",
    "metaq/server/remoting/consuming/popheader.py",
    "metaq/server/remoting/consuming/pull.py",
    "metaq/server/remoting/sending/batches.py",
    "metaq/server/remoting/sending/header.py",
    "metaq/server/remoting/sending/outcome.py",
    "metaq/server/remoting/sending/partitions.py",
    "metaq/server/remoting/sending/send.py",
    "metaq/server/remoting/sending/tags.py",
    "metaq/server/remoting/session.py",
    "metaq/server/services/outgoing.py",
    "metaq/server/text/get.py",
    "metaq/server/text/leaseanswers.py",
    "metaq/server/text/leases.py",
    "metaq/server/text/push.py",
    "metaq/server/text/put.py",
    "metaq/server/text/session.py",
    "metaq/server/wire/pace.py",
    "metaq/server/wire/session.py",
    "metaq/store/checkpoint.py",
    "metaq/store/checkpointing.py",
    "metaq/store/fence.py",
    "metaq/store/files/filecache.py",
    "metaq/store/gate.py",
    "metaq/store/index/indexfile.py",
    "metaq/store/log/commitlog.py",
    "metaq/store/log/noted.py",
    "metaq/store/log/segments.py",
    "metaq/store/log/walk.py",
    "metaq/store/messagestore.py",
    "metaq/store/ordered/engine.py",
    "metaq/store/ordered/rocksdb.py",
    "metaq/store/queues/consumequeue.py",
    "metaq/store/reading.py",
    "metaq/store/recordgroups.py",
    "metaq/store/runs.py",
    "metaq/timers/definitions.py",
    "metaq/timers/dueorder.py",
    "metaq/timers/entering.py",
    "metaq/timers/fold.py",
    "metaq/timers/handles.py",
    "metaq/timers/packs.py",
    "metaq/timers/pending.py",
    "metaq/timers/records.py",
]

# The way of a send in the client. It is an extension of its own, so that a broker does not load it.
COMPILED_CLIENT = [
    "metaq/client/checks.py",
    "metaq/client/connecting/health.py",
    "metaq/client/connecting/identity.py",
    "metaq/client/connecting/link.py",
    "metaq/client/connecting/reading.py",
    "metaq/client/connecting/transport.py",
    "metaq/client/connecting/writing.py",
    "metaq/client/sending/asynchronous.py",
    "metaq/client/sending/batches.py",
    "metaq/client/sending/sending.py",
]

PAGES = {
    "Documentation": "docs/what-metaq-can-do.md",
    "Changelog": "CHANGELOG.md",
    "Security": "SECURITY.md",
}
"""Where the package index leads beside the repository and its issues."""


def description() -> str:
    """Return the README with absolute links to the files of this version, as a package index has none of them."""
    if not README.exists():
        return ""

    def absolute(link: re.Match[str]) -> str:
        return f"]({TREE}/{'README.md' if link[1].startswith('#') else ''}{link[1]})"

    return re.sub(r"\]\((?!https?://)([^)\s]+)\)", absolute, README.read_text("utf-8"))


COMPILING = frozenset(("bdist_wheel", "build_ext"))
"""The commands that compile. Others run where mypyc is not installed yet, to find out what is needed."""


def extensions() -> list[Any]:
    """Return the compiled modules when COMPILE_METAQ=1 asks for them: `make compile`, and build_metaq.py for wheels."""
    if os.environ.get("COMPILE_METAQ") != "1" or not COMPILING.intersection(sys.argv):
        return []
    from mypyc.build import mypycify  # noqa: PLC0415 - only there when it is asked for

    # Whatever is installed here, what comes from the dependencies has no types: so all wheels of a version are the same.
    types = ["--config-file=", "--no-site-packages", "--ignore-missing-imports", f"--cache-dir={os.devnull}"]
    # Debug information is two thirds of the extension and a third of the time, and names the folder it was built in. With -O3
    # it is a tenth larger, takes a seventh more time, and is no faster.
    groups = [(COMPILED, "metaq.compiled"), (COMPILED_CLIENT, "metaq.compiled_client")]
    made = list(mypycify([*types, *COMPILED, *COMPILED_CLIENT], opt_level="2", debug_level="0", separate=groups))
    for extension in made:
        # Names that are not exported can be called directly and inlined, and take no room; C unwinds no stack.
        # Warnings about generated code help nobody, and finding them takes longer than all the rest.
        extension.extra_compile_args += ["-fvisibility=hidden", "-fno-asynchronous-unwind-tables", "-Wno-all"]
    return made


setup(
    name="metaq-broker",
    version=VERSION,
    description="A message broker in one process, with a protocol that a person can type",
    long_description=description(),
    long_description_content_type="text/markdown",
    url=REPOSITORY,
    project_urls={"Issues": f"{REPOSITORY}/issues", **{label: f"{TREE}/{page}" for label, page in PAGES.items()}},
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["message broker", "message queue", "pub/sub", "gevent", "telnet", "RocketMQ", "MetaQ", "ZooKeeper", "Spark"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: No Input/Output (Daemon)",
        "Intended Audience :: Developers",
        "Intended Audience :: System Administrators",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)),
        "Programming Language :: Python :: Implementation :: CPython",
        "Topic :: Communications",
        "Topic :: System :: Distributed Computing",
        "Topic :: System :: Networking",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    # So that an editable installation is a folder on the path: a clone beside a script, a folder `metaq` without `__init__.py`,
    # comes before what a finder would bring, and after a package on the path.
    package_dir={"": "."},
    packages=find_packages(include=["metaq", "metaq.*"]),
    py_modules=["pyspark_metaq"],
    package_data={"metaq": ["py.typed"], "metaq.server.console": ["static/*", "templates/*.html"]},
    zip_safe=False,
    ext_modules=extensions(),
    install_requires=[
        "click>=8.1",
        "crcmod>=1.7",
        "falcon>=4.0",
        "gevent>=24.2",
        "jinja2>=3.1",
        "librt>=0.16",
        "msgspec>=0.19",
        "orjson>=3.9",
        "pyyaml>=6.0",
        "rich>=13.0",
        "wsproto>=1.2",
        "zlib-ng>=0.5",
    ],
    extras_require={
        "compression": COMPRESSION,
        "deploy": DEPLOY,
        "report": [*SPARK, *REPORT],
        "spark": SPARK,
        "timers": TIMERS,
        "transaction": TRANSACTION,
        "zookeeper": ZOOKEEPER,
        "dev": [
            *CELERY,
            *COMPRESSION,
            *DEPLOY,
            *INTEGRATIONS,
            *LINTERS,
            *OPENTELEMETRY,
            *RECIPES,
            *REPORT,
            *SITE,
            *SPARK,
            *TIMERS,
            *TRANSACTION,
            *ZOOKEEPER,
            "SQLAlchemy>=2.0",
            "build>=1.2",
            "cibuildwheel>=3.0",
            "hypothesis>=6.100",
            "jsonschema>=4.20",
            "openapi-spec-validator>=0.7",
            "import-linter>=2.16",
            "packaging>=24.2",
            "playwright>=1.50",
            "prometheus-client>=0.20",
            "psycopg[binary]>=3.1",
            "pydantic>=2.6",  # the benchmarks' results
            "pytest>=9.0",
            "pytest-randomly>=3.15",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "setuptools>=77.0.3",
            "trustme>=1.1",
            "twine>=6.1",
            "types-PyYAML>=6.0",
            "types-jsonschema>=4.20",
            "types-gevent>=24.2",
            "types-setuptools>=68",
            "websockets>=15.0",
            "zope.sqlalchemy>=3.1",
        ],
    },
    entry_points={"console_scripts": ["metaq = metaq.cli:main"]},
)
