"""Schemas of the kinds that are no part of Kubernetes itself.

`kubernetes-validate` has the published ones of Kubernetes. Of these four no package has them, so they are written here
from the APIs' documentation, as far as our manifests use them and stricter where they may be: a field that is not named
here is an error. Pod templates inside are `{}`: they are checked with Kubernetes' own schema.
"""

from __future__ import annotations

from typing import Any

import jsonschema
import kubernetes_validate

from tests.deploy.manifests import Document, pods_of

Schema = dict[str, Any]

VERSION = "1.37"  # of Kubernetes

LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}, "minProperties": 1}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def strict(properties: Schema, *required: str) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def resource(api_version: str, kind: str, spec: Schema) -> Schema:
    """A namespaced document."""
    metadata = strict({"name": NAME, "namespace": NAME, "labels": LABELS, "annotations": LABELS}, "name", "namespace")
    fields = {"apiVersion": {"const": api_version}, "kind": {"const": kind}, "metadata": metadata, "spec": spec}
    return strict(fields, *fields)


# github.com/kubernetes-sigs/lws, api/leaderworkerset/v1
LEADER_WORKER_SET = resource(
    "leaderworkerset.x-k8s.io/v1",
    "LeaderWorkerSet",
    strict(
        {
            "replicas": {"type": "integer", "minimum": 0},
            "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
            "networkConfig": strict({"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}}, "subdomainPolicy"),
            "rolloutStrategy": strict(
                {
                    "type": {"const": "RollingUpdate"},
                    "rollingUpdateConfiguration": strict(
                        {
                            "partition": {"type": "integer", "minimum": 0},
                            "maxUnavailable": {"type": ["integer", "string"]},
                            "maxSurge": {"type": ["integer", "string"]},
                        }
                    ),
                },
                "type",
            ),
            "leaderWorkerTemplate": strict(
                {
                    "size": {"type": "integer", "minimum": 1},
                    "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                    "leaderTemplate": {},
                    "workerTemplate": {},
                },
                "workerTemplate",
            ),
        },
        "leaderWorkerTemplate",
    ),
)

# gateway-api-inference-extension.sigs.k8s.io/reference/spec
INFERENCE_POOL = resource(
    "inference.networking.k8s.io/v1",
    "InferencePool",
    strict(
        {
            "selector": strict({"matchLabels": LABELS}, "matchLabels"),
            "targetPorts": {
                "type": "array",
                "items": strict({"number": PORT}, "number"),
                "minItems": 1,
                "maxItems": 8,
                "uniqueItems": True,
            },
            "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
            "endpointPickerRef": strict(
                {
                    "group": {"type": "string"},
                    "kind": {"type": "string"},
                    "name": NAME,
                    "port": strict({"number": PORT}, "number"),
                    "failureMode": {"enum": ["FailOpen", "FailClose"]},
                },
                "name",
                "port",  # where the kind is Service, which is the default
            ),
        },
        "selector",
        "targetPorts",
        "endpointPickerRef",
    ),
)

# gateway-api.sigs.k8s.io/reference/spec, HTTPRoute
HTTP_ROUTE = resource(
    "gateway.networking.k8s.io/v1",
    "HTTPRoute",
    strict(
        {
            "parentRefs": {"type": "array", "items": strict({"name": NAME, "namespace": NAME}, "name"), "minItems": 1},
            "hostnames": {"type": "array", "items": NAME},
            "rules": {
                "type": "array",
                "minItems": 1,
                "items": strict(
                    {
                        "matches": {
                            "type": "array",
                            "items": strict(
                                {
                                    "path": strict(
                                        {
                                            "type": {"enum": ["PathPrefix", "Exact", "RegularExpression"]},
                                            "value": {"type": "string", "pattern": "^/"},
                                        },
                                        "type",
                                        "value",
                                    )
                                }
                            ),
                        },
                        "backendRefs": {
                            "type": "array",
                            "items": strict({"group": NAME, "kind": {"type": "string"}, "name": NAME}, "name"),
                            "minItems": 1,
                        },
                        "timeouts": strict({"request": DURATION, "backendRequest": DURATION}),
                    }
                ),
            },
        },
        "parentRefs",
        "rules",
    ),
)

# prometheus-operator.dev/docs/api-reference/api, PodMonitor
POD_MONITOR = resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    strict(
        {
            "selector": strict({"matchLabels": LABELS}, "matchLabels"),
            "podMetricsEndpoints": {
                "type": "array",
                "items": strict(
                    {"port": {"type": "string"}, "path": {"type": "string", "pattern": "^/"}, "interval": DURATION},
                    "port",
                ),
                "minItems": 1,
            },
        },
        "selector",
        "podMetricsEndpoints",
    ),
)

# Group and kind to schema.
OURS = {
    (schema["properties"]["apiVersion"]["const"], schema["properties"]["kind"]["const"]): schema
    for schema in (LEADER_WORKER_SET, INFERENCE_POOL, HTTP_ROUTE, POD_MONITOR)
}


def check(document: Document) -> None:
    """Raises jsonschema.ValidationError; LookupError where there is no schema."""
    schema = OURS.get((document["apiVersion"], document["kind"]))
    if schema is not None:
        jsonschema.validate(document, schema)
        templates = [pod.template for pod in pods_of([document])]
        for template in templates:
            check({"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template})
        return
    try:
        kubernetes_validate.validate(document, VERSION, strict=True)
    except kubernetes_validate.SchemaNotFoundError as error:
        raise LookupError(error.message) from None
