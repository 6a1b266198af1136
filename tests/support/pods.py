"""Runs the jobs of a build as pods of a cluster do: each in an empty folder, with nothing of the build's machine.

Results travel through an S3 server on this machine. Snakemake's cluster-generic executor stands in for that of
Kubernetes: both send the same command line, and with `--shared-fs-usage none` neither assumes a shared file system. A
job starts without the environment of the build, in a folder of its own that is deleted at its end. Only what is outside
of the build is in the same place as in a container with a mounted volume: the checkout, the checkpoint and the corpus.
"""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

from tests.support import warm
from tests.support.warm import CLIENT

BUCKET = "results"
PREFIX = f"s3://{BUCKET}/builds"
STORED = ("--default-storage-provider", "s3", "--default-storage-prefix", PREFIX)
KEYS = {"SNAKEMAKE_STORAGE_S3_ACCESS_KEY": "access", "SNAKEMAKE_STORAGE_S3_SECRET_KEY": "secret"}
SUBMIT = """#!/usr/bin/env bash
pod=$(mktemp --directory {pods}/XXXXXX)
cd "$pod"
(env --ignore-environment {variables} bash "$1" > "$pod.log" 2>&1; echo $? > "$pod.code"; rm -r "$pod") \\
  < /dev/null > /dev/null 2>&1 &
basename "$pod"
"""
STATUS = """#!/usr/bin/env bash
if ! test -s {pods}/"$1".code; then echo running
elif test "$(cat {pods}/"$1".code)" = 0; then echo success
else echo failed
fi
"""


@dataclass(frozen=True)
class Store:
    """An S3 server with an empty store."""

    address: str

    @property
    def environment(self) -> dict[str, str]:
        """Snakemake's variables that lead to it."""
        return {**KEYS, "SNAKEMAKE_STORAGE_S3_ENDPOINT_URL": self.address}

    def client(self) -> Any:
        """A client of it."""
        access, secret = KEYS.values()
        return boto3.client(
            "s3",
            endpoint_url=self.address,
            region_name="us-east-1",
            aws_access_key_id=access,
            aws_secret_access_key=secret,
        )

    def names(self) -> list[str]:
        """The objects in it, without the prefix of all builds."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return [found["Key"].removeprefix("builds/") for page in pages for found in page.get("Contents", ())]


@contextmanager
def store() -> Iterator[Store]:
    """Runs an S3 server within the block; the bucket is there, and empty."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        found = Store(f"http://{host}:{port}")
        found.client().create_bucket(Bucket=BUCKET)
        yield found
    finally:
        server.stop()


def cluster(folder: Path) -> tuple[str, ...]:
    """Returns the arguments with which snakemake runs its jobs as pods, whose folders lie in `folder`.

    Args:
        folder: It must not lie deeper than the build folder: jobs are told the Snakefile by its path from there.
    """
    pods, commands = folder / "pods", folder / "commands"
    pods.mkdir(parents=True)
    commands.mkdir()
    variables = {"PATH": f"{commands}:{os.environ['PATH']}", "HOME": str(pods), "HF_HUB_OFFLINE": "1"}
    texts = {
        "python": CLIENT.format(python=sys.executable, name=warm.ready()),
        "submit": SUBMIT.format(pods=pods, variables=shlex.join(f"{key}={value}" for key, value in variables.items())),
        "status": STATUS.format(pods=pods),
    }
    for name, text in texts.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    return (
        *("--executor", "cluster-generic", "--shared-fs-usage", "none", "--jobs", "2"),
        *("--cluster-generic-submit-cmd", str(commands / "submit")),
        *("--cluster-generic-status-cmd", str(commands / "status")),
        *("--seconds-between-status-checks", "1", "--latency-wait", "5"),
    )
