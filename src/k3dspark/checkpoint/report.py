"""An `Inspection` as the stable JSON object of `k3dspark inspect --json` (docs/inspect.md)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from k3dspark.checkpoint.inspection import Inspection

FORMAT: Final = 1


def inspection_as_json(inspection: Inspection) -> dict[str, Any]:
    """Plain values only. Keys are added in later versions, never renamed or removed without raising `format`."""
    public = inspection.public
    return {
        "format": FORMAT,
        "directory": str(inspection.directory),
        "complete": inspection.complete,
        "public_draft": public and {"names": list(public.names), "runs": public.runs, "note": public.note},
        "files": [asdict(file) for file in inspection.files],
        "expected": inspection.expected and asdict(inspection.expected),
        "found": asdict(inspection.found),
        "rules": [
            {
                "id": verdict.rule.id,
                "field": verdict.field,
                "status": verdict.status,
                "must": verdict.rule.must,
                "found": verdict.found,
            }
            for verdict in inspection.verdicts
        ],
        "findings": [asdict(finding) for finding in inspection.findings],
    }
