"""Where things lie: meshes of devices, heads on a mesh, and KV on its way from one mesh to another.

    "8x1"  --spec-->  MeshSpec  --devices-->  Mesh, on devices of its own
    heads     any number of heads on any tensor-parallel size: replicated KV heads, padded query heads
    sharding  logical axis names -> mesh axes; one data replica's part of an array
    plan      two cuts of one array -> the copies between them, each byte once (pure)
    reshard   a plan carried out for any array, asynchronously and without the host
    transfer  the hand-off of a sequence: the moves of true KV heads, and the protocol around them

Nothing here knows requests, models or servers. Only what is free of JAX is exported here, so that a command line can
check a mesh spec without waiting for JAX to load; the rest is imported by its module (`meshes.devices`, ...).
"""

from meshes.heads import EMPTY, HeadLayout, head_layout
from meshes.spec import MeshSpec, format_mesh_specs, parse_mesh_specs

__all__ = ["EMPTY", "HeadLayout", "MeshSpec", "format_mesh_specs", "head_layout", "parse_mesh_specs"]
