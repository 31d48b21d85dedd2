"""`jaxpd worker` with hooks: `python tests/cluster/faulty_worker.py SETTINGS worker ROLE MODEL ...`.

The same program, its parts wrapped before it starts (tests/cluster/hooks.py). SETTINGS is JSON: `{"dial": {A: B}}`
makes it connect to B where it would connect to A. Commands come as JSON, one a line of stdin, each answered by a line
`FAULT {"answer": ...}` of stdout; what the hooks see is told there as well, `FAULT {"event": ...}`. When stdin ends, so
does the process: the tests are gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from tests.cluster.hooks import Hooks


def tell(**values: Any) -> None:
    """One line of stdout, in one piece."""
    sys.stdout.write(f"FAULT {json.dumps(values)}\n")
    sys.stdout.flush()


def obey(hooks: Hooks) -> None:
    """Carries out what comes over stdin, to its end."""
    for line in sys.stdin:
        command = json.loads(line)
        tell(answer=getattr(hooks, command.pop("do"))(**command))
    os._exit(3)


def main() -> None:
    hooks = Hooks(tell)
    hooks.install(**json.loads(sys.argv.pop(1)))
    threading.Thread(target=obey, args=(hooks,), name="faults", daemon=True).start()
    from jaxpd.cli.main import main as run

    sys.argv[0] = "jaxpd"
    run()


if __name__ == "__main__":
    main()
