"""The dashboard: every query names metrics and labels that a server has; test_metrics_live.py asks a real one."""

from __future__ import annotations

import json
import pathlib
from typing import Any

DASHBOARD = pathlib.Path(__file__).parents[2] / "docs" / "grafana" / "jaxpd.json"


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"] if panel["type"] != "row"]


def test_it_is_a_dashboard_that_grafana_takes() -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert board["schemaVersion"] == 42 and board["uid"] == "jaxpd" and board["id"] is None
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    assert variables["model_name"]["query"]["query"] == "label_values(vllm:num_requests_running, model_name)"
    everything = board["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        grid = panel["gridPos"]
        cells = {(grid["x"] + dx, grid["y"] + dy) for dx in range(grid["w"]) for dy in range(grid["h"])}
        assert grid["x"] + grid["w"] <= 24 and not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells


def test_every_panel_asks_the_chosen_source_about_the_chosen_model() -> None:
    titles = [panel["title"] for panel in panels()]
    assert len(set(titles)) == len(titles)
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert 'model_name="$model_name"' in target["expr"], panel["title"]
            assert target["datasource"] == panel["datasource"]
