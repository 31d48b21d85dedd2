"""What a cluster may be, and which field an error names."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from jaxpd.errors import InvalidArgument
from serving.launch import commands, spec
from serving.launch.commands import Launch

ONE_OF_EACH: dict[str, Any] = {"model": "m", "prefill": {"count": 1}, "decode": {"count": 1}}


def test_a_file_says_everything_that_flags_can(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text((spec.__doc__ or "").partition("\n\n")[2])
    made = spec.cluster_spec(spec.read_toml(path))
    assert made.model == "smollm2-135m" and made.accelerator == "gpu"
    assert made.counts == {"prefill": 1, "decode": 2, "mixed": 0}
    assert made.decode.resources == {"GPU": 2, "CPU": 4} and made.decode.flags == ("--max-num-seqs", "64")
    assert made.router.port == 8000 and made.router.grpc_port == 50051
    assert made.environment == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}


def test_the_file_of_the_documentation_is_one(tmp_path: pathlib.Path) -> None:
    text = (pathlib.Path(__file__).parent.parent.parent / "docs" / "launch.md").read_text()
    path = tmp_path / "cluster.toml"
    path.write_text(text.partition("```toml\n")[2].partition("```")[0])
    made = spec.cluster_spec(spec.read_toml(path))
    assert made.counts == {"prefill": 1, "decode": 2, "mixed": 0} and made.drain_timeout_s == 60


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"prefil": {}}, "prefil", "not known"),
        ({"prefill": {"cuont": 1}}, "prefill.cuont", "not known"),
        ({"decode": {"count": "2"}}, "decode.count", "whole number"),
        ({"decode": {"count": True}}, "decode.count", "whole number"),
        ({"decode": {"count": -1}}, "decode.count", "between 0 and 1000"),
        ({"decode": {"count": 1, "mesh": "2"}}, "decode.mesh", "factor"),
        ({"decode": {"count": 1, "mesh": "2x1,2x1"}}, "decode.mesh", "2 meshes"),
        ({"decode": {"count": 1, "resources": {"GPU": "two"}}}, "decode.resources", "table of numbers"),
        ({"decode": {"count": 1, "resources": {"GPU": -1}}}, "decode.resources", "0 or more"),
        ({"decode": {"count": 1, "flags": "--page-size 8"}}, "decode.flags", "list of texts"),
        ({"decode": 3}, "decode", "table"),
        ({"decode": {"count": 0}}, "decode.count", "can serve nothing"),
        ({"prefill": {"count": 0}}, "prefill.count", "can serve nothing"),
        ({"router": {"port": 65536}}, "router.port", "65535"),
        ({"name": "a/b"}, "name", "letters"),
        ({"accelerator": "npu"}, "accelerator", "cpu, gpu, tpu"),
        ({"environment": {"A": 1}}, "environment", "texts"),
        ({"drain_timeout_s": 0}, "drain_timeout_s", "above 0"),
        ({"model": ""}, "model", "built-in name"),
    ],
)
def test_errors_name_the_field_and_what_it_must_be(change: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        spec.cluster_spec(ONE_OF_EACH | change)
    assert caught.value.field == field
    assert field in str(caught.value) and words in str(caught.value)


def test_a_broken_file_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(InvalidArgument, match=r"--file .*missing.toml cannot be read"):
        spec.read_toml(tmp_path / "missing.toml")
    (tmp_path / "broken.toml").write_text("model = =\n")
    with pytest.raises(InvalidArgument, match=r"--file .*broken.toml is not TOML.*line 1"):
        spec.read_toml(tmp_path / "broken.toml")


def test_scaling_gives_another_spec_that_is_checked_again() -> None:
    made = spec.cluster_spec(ONE_OF_EACH)
    assert made.scaled({"decode": 3}).counts == {"prefill": 1, "decode": 3, "mixed": 0}
    assert made.counts["decode"] == 1
    with pytest.raises(InvalidArgument, match="can serve nothing"):
        made.scaled({"decode": 0})
    with pytest.raises(InvalidArgument, match="is no role"):
        made.scaled({"decoder": 2})


@pytest.mark.parametrize("text", ["decode", "decode=", "decode=-1", "decoder=1", "decode=1,decode=2", ""])
def test_scale_says_what_it_must_look_like(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--scale"):
        spec.parse_counts(text)


def test_counts_and_resources_of_flags() -> None:
    assert spec.parse_counts("prefill=1, decode=2") == {"prefill": 1, "decode": 2}
    assert spec.parse_resources("GPU=2,CPU=0.5", flag="--decode-resources") == {"GPU": 2, "CPU": 0.5}
    with pytest.raises(InvalidArgument, match="--decode-resources GPU must be NAME=AMOUNT"):
        spec.parse_resources("GPU", flag="--decode-resources")


def test_a_worker_takes_the_devices_of_its_mesh_or_what_it_is_told() -> None:
    role = spec.RoleSpec(count=1, mesh="4x2")
    assert spec.default_resources(role, "gpu") == {"GPU": 8}
    assert spec.default_resources(role, "tpu") == {"TPU": 8}
    assert spec.default_resources(role, "cpu") == {"CPU": 1}
    told = spec.RoleSpec(count=1, mesh="4x2", resources={"TPU-v6e-8-head": 1})
    assert spec.default_resources(told, "tpu") == {"TPU-v6e-8-head": 1}


def test_every_process_gets_the_addresses_of_its_node_and_the_secret_only_as_a_file() -> None:
    made = spec.cluster_spec(
        ONE_OF_EACH
        | {"prefill": {"count": 1, "mesh": "2x1", "flags": ["--page-size", "8"]}, "mixed": {"count": 1}}
        | {"router": {"port": 1234, "flags": ["--max-tries", "5"]}}
    )

    def line(role: str, host: str) -> str:
        router = None if role == "router" else "10.0.0.9:7000"
        launch = Launch(spec=made, unit=f"{role}-0", role=role, generation=1, router=router, secret="very-secret")
        words = commands.arguments(launch, host=host, port=7000, secret_file="/run/secret")
        assert "very-secret" not in repr(launch) + " ".join(words)
        return " ".join(words)

    assert line("router", "10.0.0.9") == (
        "router --listen 10.0.0.9:7000 --host 127.0.0.1 --port 1234 --grpc-port 50051 "
        "--cluster-secret-file /run/secret --max-tries 5"
    )
    assert line("prefill", "10.0.0.5") == (
        "worker prefill m --mesh 2x1 --listen 10.0.0.5:0 --router 10.0.0.9:7000 "
        "--cluster-secret-file /run/secret --page-size 8"
    )
    assert "--listen [fd00::1]:0" in line("decode", "fd00::1")
    assert line("mixed", "10.0.0.5").endswith("--cluster-secret-file /run/secret --mode chunked")
