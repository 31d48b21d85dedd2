"""Models of the Hugging Face hub, by their id, through `huggingface_hub` and its own cache and credentials."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from jaxpd.errors import FailedPrecondition, JaxpdError, NotFound, Unavailable
from jaxpd.progress import Progress

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
# The same weights a second time in other layouts, and adapters that are not the model.
_IGNORED = ["original/*", "consolidated*.safetensors", "*/*"]
_HEARTBEAT_S = 3.0


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form owner/name."""
    return _ID.fullmatch(model) is not None


def fetch_from_hub(model: str, *, progress: Progress) -> Path:
    """The local folder of hub model `model`, downloaded when it is not in the hub's cache.

    Raises NotFound for an id that does not exist or is not open to this user, Unavailable without a network,
    FailedPrecondition when the disk does not take it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    with progress.stage(f"fetching {model} from the Hugging Face hub") as stage:
        done = threading.Event()

        def heartbeat() -> None:
            waited = 0.0
            while not done.wait(_HEARTBEAT_S):
                waited += _HEARTBEAT_S
                stage.advance(0.0, f"{waited:.0f} s")

        beat = threading.Thread(target=heartbeat, name="jaxpd-hub-heartbeat", daemon=True)
        beat.start()
        try:
            return Path(snapshot_download(model, allow_patterns=_PATTERNS, ignore_patterns=_IGNORED))
        except HfHubHTTPError as error:
            raise _http(model, error.response.status_code) from error
        except Exception as error:  # its HTTP client is an implementation detail, and so are that client's errors
            raise _other(model, error) from error
        finally:
            done.set()
            beat.join()


def _http(model: str, status: int) -> JaxpdError:
    if status in (401, 403, 404):
        return NotFound(
            f"the Hugging Face hub has no model {model!r} that this user may read (HTTP {status}); check the id, "
            "accept the model's terms on its page, or log in with `hf auth login`"
        )
    return Unavailable(f"the Hugging Face hub answered HTTP {status} for {model!r}; try again later")


def _other(model: str, error: Exception) -> JaxpdError:
    # "Not in the local cache" is an OSError for the hub, and means that there is no network.
    full = isinstance(error, OSError) and error.errno is not None
    if full:
        return FailedPrecondition(f"cannot keep {model!r} in the hub's cache: {error}")
    cause = error.__cause__ or error
    return Unavailable(
        f"cannot reach the Hugging Face hub for {model!r} ({type(cause).__name__}: {cause}), and it is not in the "
        "local cache. Check the network, give the path of a model on this machine, or use a built-in name"
    )
