"""A whole cluster from one command: `jaxpd up`, on this machine or on Ray.

    flags, TOML -> spec.ClusterSpec        what is wanted
                        |
    controller.Controller, a pass every half second:
        launcher.look()  -> what became of each process      local.py: processes of this machine
        router           -> what it says of each worker      ray_launcher.py: actors, each with one process
                                                                 (ray_cluster.py: how a command reaches them)
        reconcile.plan() -> actions: start, drain, stop      (pure)
                        |
    `python -m jaxpd worker ...`, `python -m jaxpd router ...`: a process each, tied to its owner (tether.py)

Nothing else of `serving` knows of this package: workers and routers that somebody else starts (Kubernetes, systemd, a
person) are the same.
"""
