"""The options of the commands that make a cluster: workers and the router."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from serving.cluster import Cluster

CLUSTER = "Cluster"
SAFETY = "Safety of the cluster"

ClusterSecretFile = Annotated[
    pathlib.Path | None,
    typer.Option(
        metavar="FILE",
        help="File whose first line is the secret that all workers and routers of the cluster show each other.",
        show_default=False,
        rich_help_panel=SAFETY,
    ),
]
InsecureCluster = Annotated[
    bool,
    typer.Option(
        "--insecure-cluster",
        help="Listen on other than loopback addresses without a secret: whoever gets there is obeyed.",
        rich_help_panel=SAFETY,
    ),
]
SslCertfile = Annotated[
    pathlib.Path | None,
    typer.Option(
        metavar="FILE",
        help="Certificate of this process (PEM), which it shows to whom it calls, too.",
        show_default=False,
        rich_help_panel=SAFETY,
    ),
]
SslKeyfile = Annotated[
    pathlib.Path | None,
    typer.Option(metavar="FILE", help="Its private key (PEM).", show_default=False, rich_help_panel=SAFETY),
]
SslCaCerts = Annotated[
    pathlib.Path | None,
    typer.Option(
        metavar="FILE",
        help="Authorities that must have signed the certificates of the other processes (PEM): mutual TLS.",
        show_default=False,
        rich_help_panel=SAFETY,
    ),
]
HeartbeatTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        help="Silence of another process after which it counts as gone; each says something once a second.",
        rich_help_panel=CLUSTER,
    ),
]


def cluster_of(
    *,
    cluster_secret_file: pathlib.Path | None,
    ssl_certfile: pathlib.Path | None,
    ssl_keyfile: pathlib.Path | None,
    ssl_ca_certs: pathlib.Path | None,
) -> Cluster:
    """What this process shows others, and wants to see. Raises InvalidArgument naming the flag."""
    from serving.cluster import Cluster, read_secret
    from serving.tls import tls_of

    return Cluster(secret=read_secret(cluster_secret_file), tls=tls_of(ssl_certfile, ssl_keyfile, ssl_ca_certs))
