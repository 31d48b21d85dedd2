"""Models of the Hugging Face hub, by their id, through `huggingface_hub` and its own cache and credentials."""

from __future__ import annotations

import re
from pathlib import Path

from jaxpd.checkpoints.heartbeat import heartbeat
from jaxpd.errors import FailedPrecondition, JaxpdError, NotFound, Unavailable
from jaxpd.progress import Progress

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
# The same weights a second time in other layouts, and adapters that are not the model.
_IGNORED = ["original/*", "consolidated*.safetensors", "*/*"]


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

    with progress.stage(f"fetching {model} from the Hugging Face hub") as stage, heartbeat(stage):
        try:
            return Path(snapshot_download(model, allow_patterns=_PATTERNS, ignore_patterns=_IGNORED))
        except Exception as error:  # its HTTP client is an implementation detail, and so are that client's errors
            # What the hub answered may be wrapped in "not in the local cache".
            answer = next((e for e in (error, error.__cause__) if isinstance(e, HfHubHTTPError)), None)
            if answer is not None:
                raise _http(model, answer.response.status_code) from error
            raise _other(model, error) from error


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
