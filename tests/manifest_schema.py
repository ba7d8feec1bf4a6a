"""A small structural validator of the Kubernetes objects that a plan writes: fields that the API would refuse.

Not the whole API: names, kinds, required and known fields, types, and references between the objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Problem = str
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")

# Known fields by object; a trailing ! marks a required one. Values are types or nested tables.
_PROBE = {
    "exec!": {"command!": list}, "timeoutSeconds": int, "periodSeconds": int, "failureThreshold": int,
}  # fmt: skip
_META = {"name!": str, "labels": dict, "annotations": dict}
_CONTAINER = {
    "name!": str, "image!": str, "command": list, "env": list, "ports": list, "startupProbe": _PROBE,
    "readinessProbe": _PROBE, "livenessProbe": _PROBE, "resources": {"limits": dict},
    "securityContext": {"capabilities": dict}, "volumeMounts": list,
}  # fmt: skip
_POD = {
    "hostNetwork": bool, "dnsPolicy": str, "terminationGracePeriodSeconds": int, "affinity": dict,
    "containers!": list, "volumes": list,
}  # fmt: skip
_TOP = {"apiVersion!": str, "kind!": str, "metadata!": _META}
KINDS: dict[str, dict[str, Any]] = {
    "ConfigMap": {**_TOP, "data!": dict},
    "Service": {
        **_TOP,
        "spec!": {"selector!": dict, "ports!": list, "clusterIP": str, "publishNotReadyAddresses": bool},
    },
    "StatefulSet": {
        **_TOP,
        "spec!": {
            "serviceName!": str, "replicas!": int, "podManagementPolicy": str, "updateStrategy": dict,
            "selector!": {"matchLabels!": dict},
            "template!": {"metadata!": {"labels!": dict, "annotations": dict}, "spec!": _POD},
        },
    },
}  # fmt: skip


def problems(objects: list[Any]) -> list[Problem]:
    """Everything wrong with these objects; empty when none is."""
    return [*_each(objects), *_together(objects)]


def _each(objects: list[Any]) -> Iterator[Problem]:
    for item in objects:
        if not isinstance(item, dict) or item.get("kind") not in KINDS:
            yield f"unknown object {str(item)[:60]}"
            continue
        yield from _shape(item, KINDS[item["kind"]], item["kind"])
        name = item["metadata"]["name"]
        if not _NAME.fullmatch(name) or len(name) > 63:
            yield f"{name} is no DNS label"
        if item["kind"] == "ConfigMap":
            yield from (f"{k} is no key" for k in item["data"] if not re.fullmatch(r"[-._a-zA-Z0-9]+", k))
            yield from (f"{k} is no string" for k, v in item["data"].items() if not isinstance(v, str))
        if item["kind"] == "StatefulSet":
            for container in item["spec"]["template"]["spec"]["containers"]:
                yield from _shape(container, _CONTAINER, "container")


def _shape(value: Any, table: Mapping[str, Any], where: str) -> Iterator[Problem]:
    if not isinstance(value, dict):
        yield f"{where} is {value!r}"
        return
    known = {field.rstrip("!"): kind for field, kind in table.items()}
    yield from (f"{where} has no {f[:-1]}" for f in table if f.endswith("!") and f[:-1] not in value)
    yield from (f"{where}.{f} is unknown" for f in value if f not in known)
    for field, kind in known.items():
        if field not in value:
            continue
        if isinstance(kind, dict):
            yield from _shape(value[field], kind, f"{where}.{field}")
        elif not isinstance(value[field], kind) or (kind is int and isinstance(value[field], bool)):
            yield f"{where}.{field} is {value[field]!r}"


def _together(objects: list[Any]) -> Iterator[Problem]:
    by_kind = {kind: [o for o in objects if o.get("kind") == kind] for kind in KINDS}
    services = {o["metadata"]["name"] for o in by_kind["Service"]}
    maps = {o["metadata"]["name"]: o["data"] for o in by_kind["ConfigMap"]}
    for each in by_kind["StatefulSet"]:
        spec = each["spec"]
        pod = spec["template"]["spec"]
        if spec["serviceName"] not in services:
            yield "the StatefulSet's service does not exist"
        if spec["selector"]["matchLabels"].items() - spec["template"]["metadata"]["labels"].items():
            yield "the selector does not match the template"
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for volume in volumes.values():
            if len(volume) != 2:
                yield f"volume {volume} needs exactly one source"
            if "configMap" in volume and volume["configMap"]["name"] not in maps:
                yield f"{volume['configMap']['name']} does not exist"
        for container in pod["containers"]:
            mounts = container["volumeMounts"]
            yield from (f"volume {m['name']} does not exist" for m in mounts if m["name"] not in volumes)
            if len({m["mountPath"] for m in mounts}) != len(mounts):
                yield "two volumes share a mount path"
