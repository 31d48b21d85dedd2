"""Runs the notebooks of this folder and writes what came out into them: `python colab/refresh.py` (make notebooks).

A notebook runs in a kernel of its own, started beside it. The same outputs make the same file: no times of cells and no
versions of the tools are kept.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbformat import NotebookNode

HERE = pathlib.Path(__file__).resolve().parent
NOTEBOOKS = tuple(sorted(HERE.glob("*.ipynb")))
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(path: pathlib.Path, parameters: Mapping[str, Any] | None = None, *, cell_s: float = 1800) -> NotebookNode:
    """The notebook with its outputs; `parameters` replace those of its cell with the tag "parameters".

    The kernel sees this checkout's packages. Raises nbclient's CellExecutionError for a cell that fails,
    CellTimeoutError after `cell_s` seconds of one cell.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    if parameters:
        (index,) = (i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ()))
        lines = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
        notebook.cells.insert(index + 1, nbformat.v4.new_code_cell(lines))
    client = NotebookClient(
        notebook,
        timeout=cell_s,
        record_timing=False,
        coalesce_streams=True,  # a line that was rewritten is kept as it was last
        resources={"metadata": {"path": str(path.parent)}},
    )
    packages = os.pathsep.join(part for part in (str(HERE.parent), os.environ.get("PYTHONPATH")) if part)
    client.execute(env=os.environ | {"PYTHONPATH": packages})
    for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
        if output.output_type == "stream":  # a rewritten line is as long as the longest there was
            output.text = "\n".join(line.rstrip() for line in output.text.split("\n"))
    return notebook


def write(notebook: NotebookNode, path: pathlib.Path) -> None:
    """Writes it without what differs from one tool to the next."""
    import nbformat

    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for each in NOTEBOOKS:
        write(execute(each), each)
        print(f"{each.name}: {each.stat().st_size // 1024} KiB")
